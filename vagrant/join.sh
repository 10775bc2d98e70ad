#!/usr/bin/env bash
# Joins the cluster, once the first machine has said how, and takes the image that it has built.
set -euo pipefail
# shellcheck source=vagrant/settings.sh
. "${REPOSITORY:-/lb}/vagrant/settings.sh"

retry 600 test -s "$SHARED/join"
if [ ! -e /etc/kubernetes/kubelet.conf ]; then
    bash "$SHARED/join"
fi
retry 1800 test -s "$SHARED/image.tar"
ctr --namespace k8s.io images import "$SHARED/image.tar"
