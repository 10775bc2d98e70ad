# shellcheck shell=bash
# What all scripts here agree on; sourced by them.

# The minor version of Kubernetes, as in the name of its package source.
: "${KUBERNETES_VERSION:=v1.34}"
# Addresses of pods, a /24 for each node, as Flannel has it by default.
: "${POD_CIDR:=10.244.0.0/16}"
# The image that the DaemonSet runs.
: "${IMAGE:=lb-agent:0.1.0}"
# A folder that all machines see.
: "${SHARED:=/shared}"
# The repository.
: "${REPOSITORY:=/lb}"
# The CNI plugin.
: "${FLANNEL:=https://github.com/flannel-io/flannel/releases/download/v0.27.4/kube-flannel.yml}"
export KUBERNETES_VERSION POD_CIDR IMAGE SHARED REPOSITORY FLANNEL
export KUBECONFIG="${KUBECONFIG:-/etc/kubernetes/admin.conf}"

# Runs a command until it succeeds, for so many seconds at most.
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

# The folder of the script that sources this one: vagrant uploads each script alone, so they look in the repository.
here() {
    if [ -d "$REPOSITORY/vagrant" ]; then echo "$REPOSITORY/vagrant"; else dirname "${BASH_SOURCE[0]}"; fi
}
