//! The two families of addresses. A Service with both is served in each one independently, as if each family had its
//! own proxy.

use std::net::IpAddr;

/// A family of IP addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Family {
    /// Internet Protocol version 4.
    V4,
    /// Internet Protocol version 6.
    V6,
}

/// A set of IP families.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Families {
    /// Whether IPv4 is in the set.
    pub v4: bool,
    /// Whether IPv6 is in the set.
    pub v6: bool,
}

impl Families {
    /// The empty set.
    pub const NONE: Self = Self { v4: false, v6: false };
    /// Both families.
    pub const BOTH: Self = Self { v4: true, v6: true };

    /// Whether the family is in the set.
    pub const fn contains(self, family: Family) -> bool {
        match family {
            Family::V4 => self.v4,
            Family::V6 => self.v6,
        }
    }

    /// The families that both sets contain.
    #[must_use]
    pub const fn intersection(self, other: Self) -> Self {
        Self { v4: self.v4 && other.v4, v6: self.v6 && other.v6 }
    }
}

impl FromIterator<Family> for Families {
    fn from_iter<I: IntoIterator<Item = Family>>(families: I) -> Self {
        families.into_iter().fold(Self::NONE, |set, family| match family {
            Family::V4 => Self { v4: true, ..set },
            Family::V6 => Self { v6: true, ..set },
        })
    }
}

impl Family {
    /// Both families, IPv4 first.
    pub const ALL: [Self; 2] = [Self::V4, Self::V6];

    /// The family of an address.
    pub const fn of(ip: IpAddr) -> Self {
        match ip {
            IpAddr::V4(_) => Self::V4,
            IpAddr::V6(_) => Self::V6,
        }
    }

    /// The family with this name; `None` if there is none.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|family| family.as_str() == name)
    }

    /// The family's name as Kubernetes spells it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::V4 => "IPv4",
            Self::V6 => "IPv6",
        }
    }
}
