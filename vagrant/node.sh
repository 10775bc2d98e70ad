#!/usr/bin/env bash
# Prepares a machine as a node: containerd, kubeadm, and kernel settings.
# usage: node.sh ADDRESS
set -euo pipefail
# shellcheck source=vagrant/settings.sh
. "${REPOSITORY:-/lb}/vagrant/settings.sh"

address=$1

swapoff -a
sed -i '/\sswap\s/d' /etc/fstab

cat >/etc/sysctl.d/90-kubernetes.conf <<END
net.ipv4.ip_forward = 1
net.ipv6.conf.all.forwarding = 1
END
sysctl --system >/dev/null

export DEBIAN_FRONTEND=noninteractive
apt-get -q update
apt-get -q install --yes --no-install-recommends ca-certificates containerd curl gpg
mkdir -p /etc/containerd /etc/apt/keyrings
containerd config default | sed 's/SystemdCgroup = false/SystemdCgroup = true/' >/etc/containerd/config.toml
systemctl restart containerd

packages="https://pkgs.k8s.io/core:/stable:/$KUBERNETES_VERSION/deb/"
curl -fsSL "${packages}Release.key" | gpg --batch --yes --dearmor -o /etc/apt/keyrings/kubernetes.gpg
echo "deb [signed-by=/etc/apt/keyrings/kubernetes.gpg] $packages /" >/etc/apt/sources.list.d/kubernetes.list
apt-get -q update
apt-get -q install --yes kubeadm kubectl kubelet
apt-mark hold kubeadm kubectl kubelet

# The first device of these machines leads to the Internet and has the same address on all of them.
echo "KUBELET_EXTRA_ARGS=--node-ip=$address" >/etc/default/kubelet
systemctl restart kubelet
