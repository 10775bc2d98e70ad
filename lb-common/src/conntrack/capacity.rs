//! How many connections a machine tracks.

/// Connections that a machine with `cores` CPUs tracks if no flag says otherwise, as kube-proxy sizes
/// `nf_conntrack_max`: 32,768 for each core (`conntrack.maxPerCore`), at least 131,072 (`conntrack.min`). Never more than
/// 1,048,576: all memory is allocated at the start.
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

#[cfg(test)]
mod tests {
    use super::default_connections;

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
