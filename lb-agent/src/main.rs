//! `lb-agent`: the command line.

fn main() {}
