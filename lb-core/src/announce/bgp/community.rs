//! Values of BGP communities, which routes carry.

use std::{collections::BTreeMap, fmt, str::FromStr};

use crate::{
    api,
    convert::{ConvertError, Object, object_name},
};

/// The value of a BGP community: `64512:100`, or a large one, `large:64512:1:2`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Community {
    /// A community of RFC 1997: two numbers of 16 bits.
    Standard(u16, u16),
    /// A large community of RFC 8092: three numbers of 32 bits.
    Large(u32, u32, u32),
}

impl Community {
    /// Reads the names of a `Community` object.
    ///
    /// # Errors
    ///
    /// The first name that is missing or appears twice, or the first invalid value.
    pub fn names(community: &api::Community) -> Result<BTreeMap<String, Self>, ConvertError> {
        let object = Object::new("Community", &object_name("Community", &community.metadata)?);
        let mut names = BTreeMap::new();
        for (index, alias) in community.spec.communities.iter().flatten().enumerate() {
            let field = |name: &str| format!("spec.communities[{index}].{name}");
            if alias.name.is_empty() {
                return Err(object.required(field("name"), "a community needs a name"));
            }
            let value =
                alias.value.parse().map_err(|why| object.invalid(field("value"), &alias.value, why))?;
            if names.insert(alias.name.clone(), value).is_some() {
                return Err(object.duplicate(field("name"), &alias.name));
            }
        }
        Ok(names)
    }
}

impl FromStr for Community {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const FORMS: &str = "must be two numbers of 16 bits (64512:100) or large: and three numbers of 32 bits (large:64512:1:2)";
        let read = |text: &str| -> Option<Self> {
            if let Some(large) = text.strip_prefix("large:") {
                let numbers: Vec<u32> = large.split(':').map(str::parse).collect::<Result<_, _>>().ok()?;
                let [a, b, c] = numbers[..] else { return None };
                return Some(Self::Large(a, b, c));
            }
            let (high, low) = text.split_once(':')?;
            Some(Self::Standard(high.parse().ok()?, low.parse().ok()?))
        };
        read(text).ok_or(FORMS)
    }
}

impl fmt::Display for Community {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Standard(a, b) => write!(f, "{a}:{b}"),
            Self::Large(a, b, c) => write!(f, "large:{a}:{b}:{c}"),
        }
    }
}
