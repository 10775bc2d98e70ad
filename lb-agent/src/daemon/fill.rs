//! Warns of a map before it is full, and names the flag that enlarges it, if there is one.

/// The fill from which the agent warns, in percent: an update needs free slots for the new state beside the old one.
const WARN_FROM: usize = 80;
/// The agent does not warn of maps with a smaller capacity: one Service may fill them.
const SMALL: u32 = 1024;

/// How full a map is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fill {
    pub(super) map: &'static str,
    /// Entries or slots in use.
    pub(super) used: usize,
    /// Maximum number of entries or slots.
    pub(super) capacity: u32,
}

impl Fill {
    /// The warning about a map that is nearly full; `None` for other maps and for small ones.
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
