#!/usr/bin/env bash
# Sends requests to Services of the cluster from nodes and pods, and reports failures. Removes everything that it creates.
set -euo pipefail
# shellcheck source=vagrant/settings.sh
. "${SETTINGS:-${REPOSITORY:-/lb}/vagrant/settings.sh}"

namespace=lb-e2e
requests=${REQUESTS:-30}
failures=0

# check NAME COMMAND...: runs the command and counts a failure.
check() {
    local name=$1
    shift
    if "$@"; then
        echo "ok      $name"
    else
        echo "FAILED  $name"
        failures=$((failures + 1))
    fi
}

k() {
    kubectl --namespace "$namespace" "$@"
}

clean_up() {
    kubectl delete namespace "$namespace" --ignore-not-found --wait=false >/dev/null
}

# Three web servers, one on each node, which return their names; a Service of each kind; and a client pod.
deploy() {
    kubectl create namespace "$namespace"
    k apply -f - <<END
apiVersion: apps/v1
kind: DaemonSet
metadata: { name: web }
spec:
  selector: { matchLabels: { app: web } }
  template:
    metadata: { labels: { app: web } }
    spec:
      containers:
        - name: web
          image: registry.k8s.io/e2e-test-images/agnhost:2.53
          args: [netexec, --http-port=8080, --udp-port=8081]
---
apiVersion: v1
kind: Service
metadata: { name: web }
spec:
  type: NodePort
  selector: { app: web }
  ports:
    - { name: http, port: 80, targetPort: 8080 }
    - { name: echo, port: 81, targetPort: 8081, protocol: UDP }
---
apiVersion: v1
kind: Service
metadata: { name: local }
spec:
  type: NodePort
  externalTrafficPolicy: Local
  selector: { app: web }
  ports: [{ port: 80, targetPort: 8080 }]
---
apiVersion: v1
kind: Service
metadata: { name: sticky }
spec:
  sessionAffinity: ClientIP
  selector: { app: web }
  ports: [{ port: 80, targetPort: 8080 }]
---
apiVersion: v1
kind: Service
metadata: { name: empty }
spec:
  selector: { app: none }
  ports: [{ port: 80 }]
---
apiVersion: v1
kind: Pod
metadata: { name: client, labels: { app: client } }
spec:
  containers:
    - { name: client, image: registry.k8s.io/e2e-test-images/agnhost:2.53, args: [pause] }
END
    k rollout status daemonset/web --timeout 5m
    k wait pod/client --for condition=Ready --timeout 5m
}

field() {
    k get service "$1" --output "jsonpath={$2}"
}

# Names of the answering pods, one per line. usage: answers FROM URL, where FROM is `node` or `pod`
answers() {
    local from=() number
    if [ "$1" = pod ]; then from=(k exec client --); fi
    for ((number = 0; number < requests; number++)); do
        "${from[@]}" curl --silent --show-error --max-time 3 "$2/hostname" || return 1
        echo
    done
}

# Whether all requests are answered, by so many pods. usage: reaches COUNT FROM URL
reaches() {
    local names
    names=$(answers "$2" "$3") || return 1
    [ "$(sort -u <<<"$names" | grep -c .)" -eq "$1" ]
}

refuses_at_once() {
    local status=0
    k exec client -- curl --silent --max-time 3 "$1" >/dev/null || status=$?
    # curl exits with 7 if it could not connect; 28 would be a timeout.
    [ "$status" -eq 7 ]
}

resolves() {
    k exec client -- nslookup kubernetes.default.svc.cluster.local >/dev/null
}

no_kube_proxy() {
    [ -z "$(kubectl --namespace kube-system get pods --selector k8s-app=kube-proxy --output name)" ]
}

run_checks() {
    local nodes web local_port port address
    nodes=$(kubectl get nodes --output name | grep -c .)
    web=$(field web .spec.clusterIP)
    port=$(field web '.spec.ports[0].nodePort')
    local_port=$(field local '.spec.ports[0].nodePort')
    check "there is no kube-proxy" no_kube_proxy
    check "a pod reaches every endpoint of a cluster IP" reaches "$nodes" pod "http://$web"
    check "a node reaches every endpoint of a cluster IP" reaches "$nodes" node "http://$web"
    check "session affinity stays with one endpoint" reaches 1 pod "http://$(field sticky .spec.clusterIP)"
    for address in $(kubectl get nodes --output 'jsonpath={.items[*].status.addresses[?(@.type=="InternalIP")].address}'); do
        check "node port at $address" reaches "$nodes" node "http://$address:$port"
        check "node port at $address, from a pod" reaches "$nodes" pod "http://$address:$port"
        # This machine is a node, so an internal client: all endpoints answer, as local policies hold for external clients only.
        check "node port with local policy at $address" reaches "$nodes" node "http://$address:$local_port"
    done
    check "a Service without endpoints refuses at once" refuses_at_once "http://$(field empty .spec.clusterIP)"
    check "names are resolved" resolves
}

main() {
    trap clean_up EXIT
    deploy
    run_checks
    if [ "$failures" -gt 0 ]; then
        echo "$failures checks failed"
        exit 1
    fi
    echo "all checks passed"
}

# test.sh sources this file.
if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    main "$@"
fi
