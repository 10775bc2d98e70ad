//! Describes the layout of pinned maps as text that an agent of another version can read, and converts elements from
//! one layout to another.
//!
//! A description is text. For each map, it has one line for the keys and one line for the values:
//!
//! ```text
//! CONNTRACK key 40 source=0+16 destination=16+16 …
//! CONNTRACK value 80 to.source=0+16 …
//! ```

use std::{collections::BTreeMap, fmt::Write as _};

use lb_common::layout::{Described, Field};

/// Which part of a map's elements a layout describes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Part {
    /// The keys of the map.
    Key,
    /// The values of the map.
    Value,
}

impl Part {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Key => "key",
            Self::Value => "value",
        }
    }
}

/// The fields of a struct, and where they are in its memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    /// Size of the struct in bytes.
    pub(crate) size: usize,
    /// Name, offset in bytes and size in bytes of each field.
    pub(crate) fields: Vec<(String, usize, usize)>,
}

impl Layout {
    /// The layout of the struct `T` in this version of the agent.
    pub(crate) fn of<T: Described>() -> Self {
        let field = |field: &Field| (field.name.to_owned(), field.offset, field.size);
        Self { size: size_of::<T>(), fields: T::FIELDS.iter().map(field).collect() }
    }

    fn parse(words: &mut std::str::SplitWhitespace<'_>) -> Option<Self> {
        let size = words.next()?.parse().ok()?;
        let field = |word: &str| {
            let (name, place) = word.rsplit_once('=')?;
            let (offset, bytes) = place.split_once('+')?;
            let (offset, bytes): (usize, usize) = (offset.parse().ok()?, bytes.parse().ok()?);
            (offset.checked_add(bytes)? <= size).then(|| (name.to_owned(), offset, bytes))
        };
        Some(Self { size, fields: words.map(field).collect::<Option<_>>()? })
    }

    fn render(&self) -> String {
        let mut text = self.size.to_string();
        for (name, offset, size) in &self.fields {
            // Writing to a string cannot fail.
            let _ok = write!(text, " {name}={offset}+{size}");
        }
        text
    }
}

/// The layouts of the keys and values of all maps of one version, by map name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Description(BTreeMap<(String, Part), Layout>);

/// A line of a description that cannot be parsed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the description of the maps has an invalid line: `{0}`")]
pub(crate) struct Unreadable(String);

impl Description {
    /// Adds the layouts of a map's keys and values.
    pub(crate) fn add(&mut self, map: &str, key: Layout, value: Layout) {
        self.0.insert((map.to_owned(), Part::Key), key);
        self.0.insert((map.to_owned(), Part::Value), value);
    }

    /// The layout of a map's keys or values; `None` if the map is unknown.
    pub(crate) fn get(&self, map: &str, part: Part) -> Option<&Layout> {
        self.0.get(&(map.to_owned(), part))
    }

    /// Whether a map's keys and values have the same layout in both descriptions.
    pub(crate) fn agrees(&self, other: &Self, map: &str) -> bool {
        [Part::Key, Part::Value]
            .into_iter()
            .all(|part| self.get(map, part).is_some() && self.get(map, part) == other.get(map, part))
    }

    /// The description as text, the inverse of parsing.
    pub(crate) fn render(&self) -> String {
        let line = |((map, part), layout): (&(String, Part), &Layout)| {
            format!("{map} {} {}\n", part.as_str(), layout.render())
        };
        self.0.iter().map(line).collect()
    }

    /// Parses a description; skips empty lines.
    ///
    /// # Errors
    /// The first invalid line.
    pub(crate) fn parse(text: &str) -> Result<Self, Unreadable> {
        let line = |line: &str| {
            let mut words = line.split_whitespace();
            let map = words.next()?.to_owned();
            let part = words.next()?;
            let part = [Part::Key, Part::Value].into_iter().find(|known| known.as_str() == part)?;
            Some(((map, part), Layout::parse(&mut words)?))
        };
        let lines = text.lines().filter(|line| !line.trim().is_empty());
        let parsed = lines.map(|text| line(text).ok_or_else(|| Unreadable(text.to_owned())));
        Ok(Self(parsed.collect::<Result<_, _>>()?))
    }
}

/// How to convert the bytes of a struct from one layout to another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Conversion {
    /// Byte ranges to copy: offset in the old struct, offset in the new struct, number of bytes.
    moves: Vec<(usize, usize, usize)>,
}

impl Conversion {
    /// Creates a conversion that copies each field to the field of the same name. A little-endian number that becomes
    /// narrower or wider is cut or extended with zeros at its upper end. Fields that the old layout does not have
    /// become zero.
    pub(crate) fn between(old: &Layout, new: &Layout) -> Self {
        let old_fields: BTreeMap<&str, (usize, usize)> =
            old.fields.iter().map(|(name, offset, size)| (name.as_str(), (*offset, *size))).collect();
        let one = |(name, to, size): &(String, usize, usize)| {
            let (from, old_size) = old_fields.get(name.as_str())?;
            Some((*from, *to, *old_size.min(size)))
        };
        Self { moves: new.fields.iter().filter_map(one).collect() }
    }

    /// Converts the bytes `old` into `new`, which must hold zeros. Skips a field that does not lie within both structs.
    pub(crate) fn apply(&self, old: &[u8], new: &mut [u8]) {
        for &(from, to, size) in &self.moves {
            if let (Some(from), Some(to)) = (old.get(from..from + size), new.get_mut(to..to + size)) {
                to.copy_from_slice(from);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use lb_common::conntrack::{Flow, Tuple};
    use proptest::{collection::vec, prelude::*, sample::subsequence};

    use super::*;

    const NAMES: [&str; 8] = ["to.source", "to.port", "service", "seen", "hop", "counter", "", "reserved"];

    /// A random layout: some of the names in any order, each with some bytes.
    fn layout() -> impl Strategy<Value = Layout> {
        let names = subsequence(NAMES.to_vec(), 1..=NAMES.len()).prop_shuffle();
        (names, vec(1usize..=24, NAMES.len())).prop_map(|(names, sizes)| {
            let mut size = 0;
            let mut fields = Vec::new();
            for (name, bytes) in names.into_iter().zip(sizes) {
                fields.push((name.to_owned(), size, bytes));
                size += bytes;
            }
            Layout { size, fields }
        })
    }

    fn converted(old: &Layout, new: &Layout, bytes: &[u8]) -> Vec<u8> {
        let mut result = vec![0; new.size];
        Conversion::between(old, new).apply(bytes, &mut result);
        result
    }

    fn field<'a>(layout: &Layout, name: &str, bytes: &'a [u8]) -> Option<&'a [u8]> {
        let (_, offset, size) = layout.fields.iter().find(|(other, ..)| other == name)?;
        bytes.get(*offset..offset + size)
    }

    proptest! {
        #[test]
        fn converted_field_keeps_its_value_or_is_zero(old in layout(), new in layout(), bytes in vec(any::<u8>(), 200)) {
            let bytes = &bytes[..old.size];
            let result = converted(&old, &new, bytes);
            for (name, _, size) in &new.fields {
                let mut expected = field(&old, name, bytes).unwrap_or_default().to_vec();
                expected.resize(*size, 0);
                prop_assert_eq!(field(&new, name, &result), Some(expected.as_slice()), "{}", name);
            }
        }

        /// Converts to a newer layout and back.
        #[test]
        fn round_trip_loses_only_fields_without_room(
            old in layout(),
            new in layout(),
            bytes in vec(any::<u8>(), 200),
        ) {
            let bytes = &bytes[..old.size];
            let back = converted(&new, &old, &converted(&old, &new, bytes));
            for (name, _, size) in &old.fields {
                let room = new.fields.iter().find(|(other, ..)| other == name).map_or(0, |(_, _, room)| *room);
                let mut expected = field(&old, name, bytes).unwrap_or_default()[..room.min(*size)].to_vec();
                expected.resize(*size, 0);
                prop_assert_eq!(field(&old, name, &back), Some(expected.as_slice()), "{}", name);
            }
        }

        #[test]
        fn description_survives_a_round_trip(key in layout(), value in layout()) {
            let mut description = Description::default();
            description.add("CONNTRACK", key.clone(), value);
            description.add("AFFINITY", key, Layout::of::<u32>());
            let read = Description::parse(&description.render());
            prop_assert_eq!(read.as_ref(), Ok(&description));
            prop_assert!(description.agrees(&description, "AFFINITY") && !description.agrees(&description, "VIPS"));
        }

        #[test]
        fn arbitrary_description_is_parsed_or_rejected(text in "(CONNTRACK |key |value |[0-9]{1,20} |a=[0-9]{1,20}\\+[0-9]{1,20} |\n|\\PC){0,30}") {
            if let Ok(description) = Description::parse(&text) {
                for layout in description.0.values() {
                    converted(layout, &Layout::of::<Flow>(), &vec![1; layout.size.min(1 << 20)]);
                }
            }
        }
    }

    #[test]
    fn same_layout_changes_nothing() {
        let layout = Layout::of::<Flow>();
        let bytes: Vec<u8> = (0..layout.size).map(|byte| byte.to_le_bytes()[0]).collect();
        assert_eq!(converted(&layout, &layout, &bytes), bytes);
        assert_eq!(Layout::of::<Tuple>().size, 40);
    }
}
