#!/usr/bin/env bash
# Makes the first machine the control plane of a cluster without kube-proxy, and writes the join command for the others.
# usage: control-plane.sh ADDRESS
set -euo pipefail
# shellcheck source=vagrant/settings.sh
. "${REPOSITORY:-/lb}/vagrant/settings.sh"

address=$1

if [ ! -e "$KUBECONFIG" ]; then
    kubeadm init --skip-phases=addon/kube-proxy --apiserver-advertise-address "$address" \
        --control-plane-endpoint "$address" --pod-network-cidr "$POD_CIDR"
fi
# Pods may run here as well, so all three nodes have endpoints.
kubectl taint nodes --all node-role.kubernetes.io/control-plane- || true

curl -fsSL "$FLANNEL" | "$(here)/flannel.sh" "$address" | kubectl apply -f -
kubeadm token create --print-join-command >"$SHARED/join.new"
mv "$SHARED/join.new" "$SHARED/join"
