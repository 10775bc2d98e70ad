#!/usr/bin/env bash
# Tests the scripts as far as possible without a cluster, with fake kubectl and curl.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export REPOSITORY=$PWD SETTINGS=$PWD/vagrant/settings.sh RETRY_PAUSE=0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# fails MESSAGE: ends the test with an error.
fails() {
    echo "vagrant/test.sh: $*" >&2
    exit 1
}

manifest_is_adapted_to_the_cluster() {
    local text
    text=$(vagrant/manifest.sh https://192.0.2.1:6443 <deploy/lb-agent.yaml)
    grep -q 'value: "192.0.2.1"' <<<"$text" || fails "the address of the API server is missing"
    grep -q 'API_SERVER' <<<"$text" && fails "the placeholder of the API server's address is left"
    grep -q 'image: "docker.io/library/lb-agent:0.1.0"' <<<"$text" || fails "the image is missing"
    grep -q '^    cluster-cidr: 10.244.0.0/16$' <<<"$text" || fails "the addresses of pods are missing"
    # All other lines are unchanged.
    [ "$(diff <(cat deploy/lb-agent.yaml) <(echo "$text") | grep -c '^>')" -eq 3 ] || fails "more than three lines differ"
}

flannel_reaches_the_api_server() {
    local text
    text=$(vagrant/flannel.sh 192.0.2.10 <<END
      - args:
        - --ip-masq
        - --kube-subnet-mgr
        env:
        - name: POD_NAME
END
    )
    grep -q '^        - --iface-regex=^192\\.0\\.2\\.$' <<<"$text" || fails "the device is missing: $text"
    grep -A1 KUBERNETES_SERVICE_HOST <<<"$text" | grep -q '"192.0.2.10"' || fails "the API server is missing: $text"
    if vagrant/flannel.sh 192.0.2.10 <<<"nothing" >/dev/null 2>&1; then
        fails "a manifest of another form is accepted"
    fi
}

retry_ends() {
    # shellcheck source=vagrant/settings.sh
    . vagrant/settings.sh
    retry 5 true || fails "a successful command fails"
    if retry 0 false 2>/dev/null; then fails "a failing command succeeds"; fi
}

# A fake cluster: pods answer in turn unless the case changes that.
fake_cluster() {
    mkdir -p "$work/bin"
    cat >"$work/bin/kubectl" <<'END'
#!/usr/bin/env bash
case "$*" in
*"exec client -- curl"*"http://empty"*) exit "${EMPTY_STATUS:-7}" ;;
*"exec client -- curl"*) shift 5; exec curl "$@" ;;
*"get nodes --output name"*) printf 'node/a\nnode/b\nnode/c\n' ;;
*"get nodes"*) echo "192.0.2.1 192.0.2.2" ;;
*"get service web"*clusterIP*) echo web ;;
*"get service sticky"*) echo sticky ;;
*"get service empty"*) echo empty ;;
*"get service"*) echo 30080 ;;
*"k8s-app=kube-proxy"*) printf '%s' "${KUBE_PROXY:-}" ;;
*apply*) cat >/dev/null ;;
esac
END
    cat >"$work/bin/curl" <<'END'
#!/usr/bin/env bash
turn=$(($(cat "$TURNS" 2>/dev/null || echo 0) + 1))
echo "$turn" >"$TURNS"
case "$*" in
*"http://${SILENT:-none}"*) exit 28 ;;
*http://sticky*) echo web-0 ;;
*) printf 'web-%s' "$((turn % ${PODS:-3}))" ;;
esac
END
    chmod +x "$work/bin/kubectl" "$work/bin/curl"
    export TURNS="$work/turns" REQUESTS=6 PATH="$work/bin:$PATH"
}

# Runs e2e.sh in a fake cluster and checks status and output.
# usage: end_to_end STATUS TEXT [VARIABLE=VALUE]...
end_to_end() {
    local status=0 text wanted=$1 output=$2
    shift 2
    text=$(env "$@" vagrant/e2e.sh 2>&1) || status=$?
    [ "$status" -eq "$wanted" ] || fails "$* ended with $status: $text"
    grep -qF -- "$output" <<<"$text" || fails "$*: missing in the output: $output; output: $text"
}

end_to_end_reports_failures() {
    fake_cluster
    end_to_end 0 "all checks passed"
    end_to_end 1 "FAILED  a pod reaches every endpoint of a cluster IP" PODS=2
    end_to_end 1 "FAILED  node port at 192.0.2.2" SILENT=192.0.2.2
    end_to_end 1 "FAILED  a Service without endpoints refuses at once" EMPTY_STATUS=28
    end_to_end 1 "FAILED  there is no kube-proxy" KUBE_PROXY=pod/kube-proxy-x
}

manifest_is_adapted_to_the_cluster
flannel_reaches_the_api_server
retry_ends
end_to_end_reports_failures
echo "vagrant/test.sh: ok"
