//! The types and functions of the running kernel, from its BTF (`Documentation/bpf/btf.rst`).
//!
//! The reader offers only the lookups by name that the loader needs, and so takes a few milliseconds for a file with
//! more than a hundred thousand types.

use std::fs;

/// Path of the BTF that describes the kernel's own types.
const FILE: &str = "/sys/kernel/btf/vmlinux";

/// `BTF_MAGIC`, in this machine's byte order.
const MAGIC: u16 = 0xeb9f;

/// Kinds of BTF types that a lookup needs, or that have more data after the 12-byte `struct btf_type` with which every
/// type begins.
mod kind {
    pub(super) const INT: u32 = 1;
    pub(super) const ARRAY: u32 = 3;
    pub(super) const STRUCT: u32 = 4;
    pub(super) const UNION: u32 = 5;
    pub(super) const ENUM: u32 = 6;
    pub(super) const FUNC: u32 = 12;
    pub(super) const FUNC_PROTO: u32 = 13;
    pub(super) const VAR: u32 = 14;
    pub(super) const DATASEC: u32 = 15;
    pub(super) const DECL_TAG: u32 = 17;
    pub(super) const ENUM64: u32 = 19;
}

/// Maximum nesting of anonymous structures that a lookup searches.
const DEPTH: u32 = 8;

/// Where a field is in its structure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Field {
    /// Offset from the start of the structure, in bits.
    pub(crate) offset: u32,
    /// Size in bits of a bit field; 0 for any other field.
    pub(crate) bits: u32,
}

pub(crate) struct KernelTypes {
    /// The content of the BTF file: sequences of 32-bit words, and the strings.
    bytes: Vec<u8>,
    /// Byte offset of the strings in `bytes`.
    strings: usize,
    /// Byte offset of each type in `bytes`; the first type has the id 1.
    places: Vec<usize>,
}

impl KernelTypes {
    /// Reads the types of the running kernel; `None` if it has no readable BTF.
    pub(crate) fn read() -> Option<Self> {
        Self::parse(fs::read(FILE).ok()?)
    }

    fn parse(bytes: Vec<u8>) -> Option<Self> {
        let mut types = Self { bytes, strings: 0, places: Vec::new() };
        if types.word(0)? & 0xffff != u32::from(MAGIC) {
            return None;
        }
        let header = types.size(4)?;
        let mut place = header.checked_add(types.size(8)?)?;
        let end = place.checked_add(types.size(12)?)?;
        types.strings = header.checked_add(types.size(16)?)?;
        while place < end {
            types.places.push(place);
            place += 12 + types.extra(place)?;
        }
        Some(types)
    }

    /// The BTF id of the kernel function with this name.
    pub(crate) fn function(&self, name: &str) -> Option<u32> {
        self.find(kind::FUNC, name)
    }

    /// A field of a structure, or of an anonymous structure nested in it.
    pub(crate) fn field(&self, structure: &str, name: &str) -> Option<Field> {
        let id = self.find(kind::STRUCT, structure)?;
        self.field_of(self.place(id)?, name, DEPTH)
    }

    fn field_of(&self, place: usize, name: &str, depth: u32) -> Option<Field> {
        let info = self.word(place + 4)?;
        if ![kind::STRUCT, kind::UNION].contains(&kind_of(info)) {
            return None;
        }
        let has_bit_fields = info >> 31 != 0;
        for member in 0..usize::try_from(info & 0xffff).ok()? {
            let at = place + 12 + member * 12;
            let word = self.word(at + 8)?;
            let (offset, bits) = if has_bit_fields { (word & 0xff_ffff, word >> 24) } else { (word, 0) };
            if self.is_name(self.word(at)?, name) {
                return Some(Field { offset, bits });
            }
            let is_anonymous = self.is_name(self.word(at)?, "");
            let inner = self.place(self.word(at + 4)?).filter(|_| is_anonymous && depth > 0);
            if let Some(field) = inner.and_then(|inner| self.field_of(inner, name, depth - 1)) {
                return Some(Field { offset: offset + field.offset, ..field });
            }
        }
        None
    }

    fn find(&self, kind: u32, name: &str) -> Option<u32> {
        let is_wanted = |place: &usize| {
            self.word(place + 4).is_some_and(|info| kind_of(info) == kind)
                && self.word(*place).is_some_and(|string| self.is_name(string, name))
        };
        let index = self.places.iter().position(is_wanted)?;
        u32::try_from(index + 1).ok()
    }

    fn place(&self, id: u32) -> Option<usize> {
        self.places.get(usize::try_from(id).ok()?.checked_sub(1)?).copied()
    }

    /// Whether the BTF string at this offset is `name`.
    fn is_name(&self, offset: u32, name: &str) -> bool {
        let start = usize::try_from(offset).ok().and_then(|offset| self.strings.checked_add(offset));
        let Some(rest) = start.and_then(|start| self.bytes.get(start..)) else { return false };
        rest.strip_prefix(name.as_bytes()).is_some_and(|rest| rest.first() == Some(&0))
    }

    /// Number of bytes after the 12-byte `struct btf_type` of the type at offset `place`; `None` for an unknown kind.
    fn extra(&self, place: usize) -> Option<usize> {
        let info = self.word(place + 4)?;
        let count = usize::try_from(info & 0xffff).ok()?;
        Some(match kind_of(info) {
            kind::INT | kind::VAR | kind::DECL_TAG => 4,
            kind::ARRAY => 12,
            kind::STRUCT | kind::UNION | kind::DATASEC | kind::ENUM64 => count * 12,
            kind::ENUM | kind::FUNC_PROTO => count * 8,
            // Pointers, typedefs, qualifiers, forward declarations, functions, floats and type tags have no more bytes.
            2 | 7..=12 | 16 | 18 => 0,
            _ => return None,
        })
    }

    fn size(&self, at: usize) -> Option<usize> {
        usize::try_from(self.word(at)?).ok()
    }

    fn word(&self, at: usize) -> Option<u32> {
        let bytes = self.bytes.get(at..at.checked_add(4)?)?;
        Some(u32::from_ne_bytes(bytes.try_into().ok()?))
    }
}

const fn kind_of(info: u32) -> u32 {
    info >> 24 & 0x1f
}

#[cfg(test)]
mod tests {
    use std::hint::black_box;

    use super::*;

    /// A BTF file with `int`, an anonymous structure with a bit field, `sk_buff` (which contains that structure at byte
    /// 16), and a function.
    fn example() -> Vec<u8> {
        let names = b"\0int\0sk_buff\0ip_summed\0len\0cast\0";
        let name = |wanted: &str| {
            let wanted = [b"\0", wanted.as_bytes(), b"\0"].concat();
            u32::try_from(names.windows(wanted.len()).position(|found| found == wanted).unwrap() + 1).unwrap()
        };
        let structure = |fields: u32| 4 << 24 | 1 << 31 | fields;
        let types = [
            vec![name("int"), 1 << 24, 4, 32],
            vec![0, structure(1), 4, name("ip_summed"), 1, 2 << 24 | 5],
            vec![name("sk_buff"), structure(2), 20, name("len"), 1, 0, 0, 2, 128],
            vec![name("cast"), 12 << 24, 1],
        ]
        .concat();
        let length = u32::try_from(types.len() * 4).unwrap();
        let header = [u32::from(MAGIC) | 1 << 16, 24, 0, length, length, u32::try_from(names.len()).unwrap()];
        let words = header.into_iter().chain(types);
        words.flat_map(u32::to_ne_bytes).chain(names.iter().copied()).collect()
    }

    #[test]
    fn fields_and_functions_are_found_by_name() {
        let types = KernelTypes::parse(example()).unwrap();
        assert_eq!(types.field("sk_buff", "ip_summed"), Some(Field { offset: 133, bits: 2 }));
        assert_eq!(types.field("sk_buff", "len"), Some(Field { offset: 0, bits: 0 }));
        assert_eq!(types.field("sk_buff", "ip"), None);
        assert_eq!(types.field("int", "len"), None);
        assert_eq!(types.function("cast"), Some(4));
        assert_eq!(types.function("sk_buff"), None);
    }

    #[test]
    fn truncated_or_changed_files_never_panic() {
        let field_in =
            |bytes: Vec<u8>| KernelTypes::parse(bytes).and_then(|types| types.field("sk_buff", "ip_summed"));
        let whole = example();
        for length in 0..whole.len() {
            let found = field_in(whole[..length].to_vec());
            assert!(found.is_none_or(|field| field.offset == 133), "{length} bytes: {found:?}");
        }
        for at in 0..whole.len() {
            let mut bytes = whole.clone();
            bytes[at] ^= 0xff;
            black_box(field_in(bytes));
        }
    }
}
