//! The two tc hooks of a device, and the names of the links that are pinned for them.

use std::path::Path;

use crate::bpf::sys::{Position, Tcx};

/// The direction of packets on a device, as the host sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Direction {
    /// Packets that arrive at the host through the device.
    Ingress,
    /// Packets that leave the host through the device.
    Egress,
}

impl Direction {
    pub(crate) const BOTH: [Self; 2] = [Self::Ingress, Self::Egress];

    /// The direction's name in tables, JSON and names of pins.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Ingress => "ingress",
            Self::Egress => "egress",
        }
    }

    pub(crate) const fn tcx(self) -> Tcx {
        match self {
            Self::Ingress => Tcx::Ingress,
            Self::Egress => Tcx::Egress,
        }
    }

    pub(crate) const fn position(self) -> Position {
        match self {
            Self::Ingress => Position::First,
            Self::Egress => Position::Last,
        }
    }
}

/// Interface index and direction in the name of a link's pin, such as `7-ingress`.
pub(crate) fn parse_pin(path: &Path) -> Option<(u32, Direction)> {
    let (index, direction) = path.file_name()?.to_str()?.split_once('-')?;
    let direction = Direction::BOTH.into_iter().find(|candidate| candidate.as_str() == direction)?;
    Some((index.parse().ok()?, direction))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pin_name_gives_device_and_direction() {
        assert_eq!(parse_pin(Path::new("/x/links/17-egress")), Some((17, Direction::Egress)));
        assert_eq!(parse_pin(Path::new("/x/links/17-sideways")), None);
        assert_eq!(parse_pin(Path::new("/x/links/eth0-ingress")), None);
    }
}
