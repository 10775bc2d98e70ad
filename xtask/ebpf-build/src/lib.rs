//! Finds the BPF toolchain and builds the BPF object.
