#!/usr/bin/env bash
# Installs the DaemonSet from deploy/ and waits until it is ready.
set -euo pipefail
# shellcheck source=vagrant/settings.sh
. "${REPOSITORY:-/lb}/vagrant/settings.sh"

endpoint=$(kubectl config view --raw --minify --output 'jsonpath={.clusters[0].cluster.server}')
"$(here)/manifest.sh" "$endpoint" <"$REPOSITORY/deploy/lb-agent.yaml" | kubectl apply -f -
kubectl -n kube-system rollout status daemonset/lb-agent --timeout 10m
