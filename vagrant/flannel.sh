#!/usr/bin/env bash
# Adapts Flannel's manifest, from standard input, to these machines: it reaches the API server without a Service, because no
# proxy runs when it starts, and it uses the device that the machines share.
# usage: flannel.sh CONTROL_PLANE_ADDRESS
set -euo pipefail

address=$1
shared=${address%.*}

awk -v address="$address" -v shared="${shared//./\\\\.}\\\\." '
    { print }
    /^ *- --kube-subnet-mgr *$/ {
        indent = $0
        sub(/-.*/, "", indent)
        print indent "- --iface-regex=^" shared
        regexes++
    }
    /^ *env: *$/ {
        indent = $0
        sub(/env.*/, "", indent)
        print indent "- name: KUBERNETES_SERVICE_HOST"
        print indent "  value: \"" address "\""
        print indent "- name: KUBERNETES_SERVICE_PORT"
        print indent "  value: \"6443\""
        environments++
    }
    END {
        if (regexes != 1 || environments < 1) {
            print "flannel.sh: the manifest does not have the expected form" > "/dev/stderr"
            exit 1
        }
    }
'
