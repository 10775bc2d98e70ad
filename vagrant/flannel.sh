#!/usr/bin/env bash
# Flannel's manifest, from standard input, for these machines: it finds the API server without any Service, as there is no proxy
# when it starts, and uses the device that the machines share.
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
            print "flannel.sh: this is not the manifest that was expected" > "/dev/stderr"
            exit 1
        }
    }
'
