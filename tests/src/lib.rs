//! The testbed: namespaces, links, servers and clients, for the demo and for the tests that need root.
