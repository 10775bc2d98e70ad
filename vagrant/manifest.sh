#!/usr/bin/env bash
# Adapts deploy/lb-agent.yaml, from standard input, to this cluster: address of the API server, image, pod network.
# usage: manifest.sh https://ADDRESS:PORT
set -euo pipefail
# shellcheck source=vagrant/settings.sh
. "$(dirname "${BASH_SOURCE[0]}")/settings.sh"

host=${1#https://}
host=${host%:*}
sed -e "s/API_SERVER/$host/" \
    -e "s,image: \"lb-agent:0.1.0\",image: \"docker.io/library/$IMAGE\"," \
    -e "/^  config.yaml: |$/a\\    cluster-cidr: $POD_CIDR"
