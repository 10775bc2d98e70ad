//! How many connections a machine tracks, and the slots that they need.

/// Connections that a machine with `cores` CPUs tracks if no flag says otherwise, as kube-proxy sizes
/// `nf_conntrack_max`: 32,768 for each core (`conntrack.maxPerCore`), at least 131,072 (`conntrack.min`). Never more
/// than 1,048,576: all memory of the flow table is allocated at the start.
pub const fn default_connections(cores: u32) -> u32 {
    const PER_CORE: u32 = 32_768;
    const LEAST: u32 = 131_072;
    const MOST: u32 = 1 << 20;
    let connections = cores.saturating_mul(PER_CORE);
    if connections < LEAST {
        LEAST
    } else if connections > MOST {
        MOST
    } else {
        connections
    }
}

/// Slots of the flow table (`FLOWS`) for that many connections: a power of two from 16 to 2^30. If each connection has
/// two entries, up to 2^28 connections fill at most half of the slots, so that nearly every entry finds a place.
pub const fn flow_slots(connections: u32) -> u32 {
    const LEAST: u32 = 16;
    const MOST: u32 = 1 << 30;
    let wanted = connections.saturating_mul(4);
    if wanted > MOST {
        MOST
    } else if wanted < LEAST {
        LEAST
    } else {
        wanted.next_power_of_two()
    }
}

#[cfg(test)]
mod tests {
    use super::{default_connections, flow_slots};

    #[test]
    fn flow_table_has_a_power_of_two_of_slots_and_room_for_twice_the_entries() {
        for (connections, slots) in [
            (0, 16),
            (1, 16),
            (4, 16),
            (5, 32),
            (131_072, 1 << 19),
            (131_073, 1 << 20),
            (1 << 20, 1 << 22),
            (u32::MAX, 1 << 30),
        ] {
            assert_eq!(flow_slots(connections), slots, "{connections} connections");
        }
    }

    #[test]
    fn connections_follow_the_cores_as_with_kube_proxy() {
        for (cores, connections) in [
            (0, 131_072),
            (1, 131_072),
            (4, 131_072),
            (5, 163_840),
            (16, 524_288),
            (32, 1 << 20),
            (33, 1 << 20),
            (u32::MAX, 1 << 20),
        ] {
            assert_eq!(default_connections(cores), connections, "{cores} cores");
        }
    }
}
