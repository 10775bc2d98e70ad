//! `cargo xtask`: everything with side effects.

fn main() {}
