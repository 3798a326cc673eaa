//! Project automation: demo, test, bench, promises, fuzz, document generation.

fn main() {}
