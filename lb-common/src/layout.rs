//! Descriptions of the keys and values of the pinned maps. They let an agent with another layout read, field by field,
//! the elements that an agent of this version wrote (see `bpf::description` of lb-datapath).
//!
//! A field keeps its described name as long as its meaning stays the same, even when the Rust field is renamed. A field
//! whose meaning changes gets another name. A new field must make sense as 0, its value in elements that an earlier
//! layout wrote. Arrays of structs count as one field.

/// A field of a struct.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// The field's path in the struct, such as `to.source`.
    pub name: &'static str,
    /// Number of bytes before the field.
    pub offset: usize,
    /// The field's size in bytes; numbers are little-endian.
    pub size: usize,
}

impl Field {
    /// The field `name` at `offset`. Its type `T`, and so its size, is inferred from `_get`.
    pub const fn new<S, T>(name: &'static str, offset: usize, _get: fn(&S) -> &T) -> Self {
        Self { name, offset, size: size_of::<T>() }
    }
}

/// A key or a value of a pinned map.
pub trait Described {
    /// All fields of the type, in the order of their offsets.
    const FIELDS: &'static [Field];
}

/// Lists the fields of a struct in their order: `describe!(Flow { to.source, service })`. A field that was renamed
/// keeps the name under which earlier agents stored it: `describe!(Flow { syns = "asked" })`.
macro_rules! describe {
    ($kind:ty { $($(#[$condition:meta])* $($name:ident).+ $(= $stored:literal)?),+ $(,)? }) => {
        impl $crate::layout::Described for $kind {
            const FIELDS: &'static [$crate::layout::Field] = &[$($(#[$condition])* $crate::layout::Field::new(
                $crate::layout::stored_name(stringify!($($name).+), &[$($stored)?]),
                core::mem::offset_of!($kind, $($name).+),
                |it: &$kind| &it.$($name).+,
            )),+];
        }
    };
}

pub(crate) use describe;

/// The name of a field in descriptions: its path, or the name before it was renamed.
pub(crate) const fn stored_name(name: &'static str, earlier: &[&'static str]) -> &'static str {
    match earlier {
        [earlier, ..] => earlier,
        [] => name,
    }
}

/// Describes numbers and addresses: one field without a name.
macro_rules! describe_numbers {
    ($($kind:ty),+) => {
        $(impl Described for $kind {
            const FIELDS: &'static [Field] = &[Field { name: "", offset: 0, size: size_of::<Self>() }];
        })+
    };
}

impl Described for () {
    const FIELDS: &'static [Field] = &[];
}

describe_numbers!(u32, u64, i64, crate::Address);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Affinity, Backend, ConnectionLimits, DeviceInfo, Endpoint, EndpointName, FragmentKey,
        FragmentedDatagram, Service, ServiceClient, ServiceKey, ServiceName, Settings, SocketBackend,
        SocketConnection, SocketKey, SourceRangeKey, Vip,
        conntrack::{Flow, Tuple},
        flow_table::{Header, Slot},
    };

    /// How many bytes the fields cover without gaps, and the size of the struct.
    fn covered<T: Described>() -> (usize, usize) {
        let mut end = 0;
        for field in T::FIELDS {
            assert_eq!(field.offset, end, "{} of {}", field.name, core::any::type_name::<T>());
            end += field.size;
        }
        (end, size_of::<T>())
    }

    #[test]
    fn described_fields_cover_every_byte_of_every_struct() {
        for (covered, size) in [
            covered::<Tuple>(),
            covered::<Flow>(),
            covered::<Slot>(),
            covered::<Header>(),
            covered::<ServiceKey>(),
            covered::<Service>(),
            covered::<Backend>(),
            covered::<Vip>(),
            covered::<SourceRangeKey>(),
            covered::<ServiceClient>(),
            covered::<Affinity>(),
            covered::<ConnectionLimits>(),
            covered::<DeviceInfo>(),
            covered::<Endpoint>(),
            covered::<EndpointName>(),
            covered::<ServiceName>(),
            covered::<FragmentKey>(),
            covered::<FragmentedDatagram>(),
            covered::<Settings>(),
            covered::<SocketBackend>(),
            covered::<SocketConnection>(),
            covered::<SocketKey>(),
            covered::<u32>(),
        ] {
            assert_eq!(covered, size);
        }
    }

    #[test]
    fn field_names_are_paths() {
        let source = Flow::FIELDS.iter().find(|field| field.name == "to.source").expect("Flow has a tuple");
        assert_eq!((source.offset, source.size), (core::mem::offset_of!(Flow, to), 16));
    }

    #[test]
    fn renamed_fields_keep_the_names_that_earlier_agents_stored() {
        let name = |offset| Flow::FIELDS.iter().find(|field| field.offset == offset).map(|field| field.name);
        assert_eq!(name(core::mem::offset_of!(Flow, syns)), Some("asked"));
    }
}
