# docker build -f deploy/bird.Dockerfile -t lb-bird:2 deploy
#
# BIRD 2 for the chart's value bgp.enabled.

FROM debian:bookworm-slim
# Debian fixes bugs within one version, so none is pinned.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends bird2 \
    && rm -rf /var/lib/apt/lists/*
CMD ["bird", "--version"]
