use bytemuck::{Pod, Zeroable};

use crate::layout::describe;

/// Size in bytes of the field for a name: the maximum length of a DNS label (RFC 1123). Most names of nodes and pods
/// fit; longer ones are cut.
pub const NAME_SIZE: usize = 63;
/// Size in bytes of the field for a zone's name; longer names are cut.
pub const ZONE_SIZE: usize = 58;

/// Value of `SERVICE_NAMES`, keyed by [`crate::Service::id`]: the Kubernetes names of a service port. The programs
/// never read it. The commands read it, and the agent reads it after a restart, because the agent keeps its state only
/// in the kernel.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct ServiceName {
    /// Namespace, UTF-8, padded with zeros.
    pub namespace: [u8; NAME_SIZE],
    /// Name of the Service object, UTF-8, padded with zeros.
    pub name: [u8; NAME_SIZE],
    /// Name of the port, UTF-8, padded with zeros; empty for an unnamed port.
    pub port_name: [u8; NAME_SIZE],
    /// IP protocol number of the service port.
    pub protocol: u8,
    /// `nodePort` of the service port, host byte order; 0 if it has none. Kept here so that a node port that the agent
    /// allocated survives a restart of the agent.
    pub node_port: u16,
}

// An element takes 56 bytes for the kernel's own data, 8 for the key, and the value; the kernel rounds the sum up to a
// power of two. Here the sum is 256, so another byte would double the memory.
const _: () = assert!(size_of::<ServiceName>() == 192);

describe!(ServiceName { namespace, name, port_name, protocol, node_port });

/// Value of `ENDPOINT_NAMES`, keyed by the endpoint's [`crate::Address`]: its Kubernetes names.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct EndpointName {
    /// Node the endpoint runs on, UTF-8, padded with zeros.
    pub node: [u8; NAME_SIZE],
    /// Zone of that node, UTF-8, padded with zeros.
    pub zone: [u8; ZONE_SIZE],
    /// Name of the pod, UTF-8, padded with zeros; its namespace is the service's.
    pub pod: [u8; NAME_SIZE],
}

// As for `ServiceName`: 56 bytes for the kernel's own data, 16 for the key, and the value make 256.
const _: () = assert!(size_of::<EndpointName>() == 184);

describe!(EndpointName { node, zone, pod });

/// Writes `text` into `N` bytes, cut at a character boundary and padded with zeros.
pub fn to_fixed<const N: usize>(text: &str) -> [u8; N] {
    let mut fixed = [0; N];
    let mut end = text.len().min(N);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    fixed[..end].copy_from_slice(&text.as_bytes()[..end]);
    fixed
}

/// The text before the first zero; empty if it is not UTF-8.
pub fn from_fixed(fixed: &[u8]) -> &str {
    let end = fixed.iter().position(|byte| *byte == 0).unwrap_or(fixed.len());
    core::str::from_utf8(&fixed[..end]).unwrap_or("")
}

#[cfg(feature = "user")]
mod pod {
    // SAFETY: `repr(C)`, any bit pattern is valid and there is no padding (derive(bytemuck::Pod) checks both).
    unsafe impl aya::Pod for super::ServiceName {}
    // SAFETY: `repr(C)`, any bit pattern is valid and there is no padding (derive(bytemuck::Pod) checks both).
    unsafe impl aya::Pod for super::EndpointName {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_names_are_cut_at_a_character_boundary() {
        assert_eq!(from_fixed(&to_fixed::<3>("ab")), "ab");
        assert_eq!(from_fixed(&to_fixed::<3>("abc")), "abc");
        assert_eq!(from_fixed(&to_fixed::<3>("abcd")), "abc");
        assert_eq!(from_fixed(&to_fixed::<3>("aéé")), "aé");
        assert_eq!(from_fixed(&to_fixed::<3>("éé")), "é");
    }
}
