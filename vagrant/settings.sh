# shellcheck shell=bash
# Settings of all scripts in this folder, which source this file.

# Minor version of Kubernetes, as in the name of its package source.
: "${KUBERNETES_VERSION:=v1.34}"
# Pod network, a /24 per node: Flannel's default.
: "${POD_CIDR:=10.244.0.0/16}"
# Image of the DaemonSet.
: "${IMAGE:=lb-agent:0.1.0}"
# Folder that all machines share.
: "${SHARED:=/shared}"
# The repository.
: "${REPOSITORY:=/lb}"
# The CNI plugin.
: "${FLANNEL:=https://github.com/flannel-io/flannel/releases/download/v0.27.4/kube-flannel.yml}"
export KUBERNETES_VERSION POD_CIDR IMAGE SHARED REPOSITORY FLANNEL
export KUBECONFIG="${KUBECONFIG:-/etc/kubernetes/admin.conf}"

# Runs a command until it succeeds, for at most so many seconds.
# usage: retry SECONDS COMMAND...
retry() {
    local until=$((SECONDS + $1))
    shift
    until "$@"; do
        if [ "$SECONDS" -ge "$until" ]; then
            echo "gave up: $*" >&2
            return 1
        fi
        sleep "${RETRY_PAUSE:-2}"
    done
}

# Folder of the scripts. Vagrant uploads each script alone, so they find the others in the repository.
here() {
    if [ -d "$REPOSITORY/vagrant" ]; then echo "$REPOSITORY/vagrant"; else dirname "${BASH_SOURCE[0]}"; fi
}
