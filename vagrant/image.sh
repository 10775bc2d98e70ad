#!/usr/bin/env bash
# Builds the image on the first machine and copies it to the shared folder.
set -euo pipefail
# shellcheck source=vagrant/settings.sh
. "${REPOSITORY:-/lb}/vagrant/settings.sh"

export DEBIAN_FRONTEND=noninteractive
apt-get -q install --yes --no-install-recommends buildah
buildah build --file "$REPOSITORY/deploy/Dockerfile" --tag "docker.io/library/$IMAGE" "$REPOSITORY"
rm -f "$SHARED/image.new"
buildah push "docker.io/library/$IMAGE" "docker-archive:$SHARED/image.new:docker.io/library/$IMAGE"
ctr --namespace k8s.io images import "$SHARED/image.new"
mv "$SHARED/image.new" "$SHARED/image.tar"
