//! Warns of a map that is nearly full, and names the flag that enlarges it, if there is one.

/// Fill in percent from which the agent warns: an update needs free slots for the new state beside the old one.
const WARN_FROM: usize = 80;
/// Capacity below which the agent does not warn of a map: one Service may fill it.
const SMALL: u32 = 1024;

/// How full one BPF map is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fill {
    pub(super) map: &'static str,
    /// Number of entries or slots that are in use.
    pub(super) used: usize,
    /// Maximum number of entries or slots.
    pub(super) capacity: u32,
}

impl Fill {
    /// The warning about this map; `None` if the map is small or not nearly full.
    pub(super) fn warning(&self) -> Option<String> {
        let Self { map, used, capacity } = self;
        if *capacity < SMALL || used * 100 < *capacity as usize * WARN_FROM {
            return None;
        }
        let enlarge = |flag| {
            format!("run `lb-agent cleanup`, which cuts all connections, and restart with a larger {flag}")
        };
        let advice = match *map {
            "SERVICES" | "VIPS" => format!("before it is full, {}", enlarge("--max-frontends")),
            "BACKENDS" => format!("before it is full, {}", enlarge("--max-backends")),
            "TABLES" => {
                let larger = enlarge("--max-table-slots");
                format!("before it is full, give Services smaller tables, or {larger}")
            }
            _ => "Services that are created when it is full will wait".to_owned(),
        };
        Some(format!("{map} is nearly full: {used} of {capacity} entries are used; {advice}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nearly_full_map_is_reported_with_its_flag() {
        let fill = |used| Fill { map: "BACKENDS", used, capacity: 10_000 }.warning();
        assert_eq!(fill(7_999), None);
        let warning = fill(8_000).unwrap_or_default();
        assert!(warning.contains("8000 of 10000") && warning.contains("--max-backends"), "{warning}");
    }
}
