#!/bin/sh
# Wraps rustc for the crates of this workspace (RUSTC_WORKSPACE_WRAPPER): they get libFuzzer's coverage counters, and
# what runs for each input is optimised, with its assertions. Everything else is what `cargo test` builds, so it is built
# once for both. All flags are stable. There is no address sanitizer, which needs a nightly compiler.
case " $* " in
# They run during the build, without libFuzzer.
*" build_script_build "* | *" ebpf_build "*) exec "$@" ;;
# lb-agent depends on them, but no target runs their code.
*" lb_kubectl "* | *" lb_output "* | *" lb_web "*) exec "$@" ;;
# Optimising these would take minutes.
*" lb_agent "* | *" lb_datapath "*) optimise="-Copt-level=0" ;;
*) optimise="-Copt-level=2 -Cdebug-assertions=on -Coverflow-checks=on" ;;
esac
# shellcheck disable=SC2086 # several words
exec "$@" $optimise \
    -Cpasses=sancov-module \
    -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
    -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares
