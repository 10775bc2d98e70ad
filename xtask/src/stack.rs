//! The combined stack of the functions of a BPF object, as Linux 6.1 computes it: newer kernels round less.

use std::collections::BTreeMap;

use anyhow::Context as _;
use object::{Object as _, ObjectSection as _, ObjectSymbol as _, RelocationTarget, SymbolKind};

/// The stack that a chain of calls may take (`MAX_BPF_STACK`).
pub(crate) const LIMIT: u32 = 512;
/// Linux 6.1 rounds each frame up to a multiple of this size (`check_max_stack_depth`).
const FRAME_UNIT: u32 = 32;

/// Section and offset of a function.
type Position = (usize, u64);

/// A function of the BPF object: the size of its stack frame, and the functions that it calls.
#[derive(Debug, Default)]
struct Function {
    name: String,
    frame: u32,
    calls: Vec<Position>,
}

/// The chain of calls that takes the most stack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Chain {
    /// Size of all frames in bytes, each rounded up to a multiple of [`FRAME_UNIT`].
    pub(crate) bytes: u32,
    /// The functions, each with the size of its frame before the rounding.
    pub(crate) functions: Vec<String>,
}

/// The deepest chain of the object.
pub(crate) fn deepest(file: &object::File<'_>) -> anyhow::Result<Option<Chain>> {
    Ok(deepest_of(&functions(file)?))
}

fn deepest_of(functions: &BTreeMap<Position, Function>) -> Option<Chain> {
    let mut known = BTreeMap::new();
    let chains =
        functions.keys().map(|position| chain_from(functions, *position, &mut known)).collect::<Vec<_>>();
    chains.into_iter().max_by_key(|chain| chain.bytes)
}

/// The deepest chain that begins with this function. (The verifier refuses recursion.)
fn chain_from(
    functions: &BTreeMap<Position, Function>,
    position: Position,
    known: &mut BTreeMap<Position, Chain>,
) -> Chain {
    if let Some(chain) = known.get(&position) {
        return chain.clone();
    }
    let nothing = Chain { bytes: 0, functions: Vec::new() };
    let Some(function) = functions.get(&position) else { return nothing };
    let called = function.calls.iter().map(|called| chain_from(functions, *called, known));
    let rest = called.max_by_key(|chain| chain.bytes).unwrap_or(nothing);
    let mut chain = Chain {
        bytes: function.frame.max(1).next_multiple_of(FRAME_UNIT) + rest.bytes,
        functions: vec![format!("{} ({})", function.name, function.frame)],
    };
    chain.functions.extend(rest.functions);
    known.insert(position, chain.clone());
    chain
}

fn functions(file: &object::File<'_>) -> anyhow::Result<BTreeMap<Position, Function>> {
    let mut functions = BTreeMap::new();
    for symbol in file.symbols().filter(|symbol| symbol.kind() == SymbolKind::Text) {
        let Some(index) = symbol.section_index() else { continue };
        let section = file.section_by_index(index)?;
        let end = symbol.address() + symbol.size();
        let range = usize::try_from(symbol.address())?..usize::try_from(end)?;
        let code = section
            .data()?
            .get(range)
            .with_context(|| format!("{} is cut off", section.name().unwrap_or_default()))?;
        let targets = targets(file, &section, symbol.address()..end)?;
        let code: Vec<Instruction> = code.chunks_exact(8).map(Instruction::read).collect();
        let calls = calls(&code, index.0, symbol.address(), &targets);
        let function = Function { name: symbol.name()?.to_owned(), frame: frame(&code), calls };
        functions.insert((index.0, symbol.address()), function);
    }
    Ok(functions)
}

/// The symbols that the relocations in this range of the section refer to, by the offset of the relocation. The `bool`
/// is true for the symbol of a whole section, to which the instruction adds an offset.
fn targets(
    file: &object::File<'_>,
    section: &object::Section<'_, '_>,
    range: std::ops::Range<u64>,
) -> anyhow::Result<BTreeMap<u64, (Position, bool)>> {
    let mut targets = BTreeMap::new();
    for (offset, relocation) in section.relocations().filter(|(offset, _)| range.contains(offset)) {
        let RelocationTarget::Symbol(index) = relocation.target() else { continue };
        let symbol = file.symbol_by_index(index)?;
        let Some(section) = symbol.section_index() else { continue };
        targets.insert(offset, ((section.0, symbol.address()), symbol.kind() == SymbolKind::Section));
    }
    Ok(targets)
}

/// An instruction. (Loading a 64-bit constant counts as two.)
#[derive(Clone, Copy, Debug)]
struct Instruction {
    code: u8,
    to: u8,
    from: u8,
    offset: i16,
    constant: i32,
}

const CALL: u8 = 0x85;
const LOAD_CONSTANT: u8 = 0x18;
const MOVE: u8 = 0xbf;
const ADD_CONSTANT: u8 = 0x07;
/// Value of the source register field in a call to another function of the object (`BPF_PSEUDO_CALL`).
const CALL_OF_FUNCTION: u8 = 1;
const FRAME_POINTER: u8 = 10;

impl Instruction {
    fn read(bytes: &[u8]) -> Self {
        let byte = |at: usize| bytes.get(at).copied().unwrap_or_default();
        Self {
            code: byte(0),
            to: byte(1) & 15,
            from: byte(1) >> 4,
            offset: i16::from_le_bytes([byte(2), byte(3)]),
            constant: i32::from_le_bytes([byte(4), byte(5), byte(6), byte(7)]),
        }
    }
}

/// The functions that this code calls, or hands to a helper that calls them.
fn calls(
    code: &[Instruction],
    section: usize,
    start: u64,
    targets: &BTreeMap<u64, (Position, bool)>,
) -> Vec<Position> {
    let mut calls = Vec::new();
    for (at, instruction) in (start..).step_by(8).zip(code) {
        let relative = |from: u64| from.wrapping_add_signed(i64::from(instruction.constant) * 8);
        match (instruction.code, targets.get(&at)) {
            (CALL, None) if instruction.from == CALL_OF_FUNCTION => calls.push((section, relative(at + 8))),
            (CALL, Some(((section, base), true))) => calls.push((*section, relative(base + 8))),
            (CALL, Some((position, false))) => calls.push(*position),
            (LOAD_CONSTANT, Some(((section, base), true))) => {
                calls.push((*section, base.wrapping_add_signed(i64::from(instruction.constant))));
            }
            (LOAD_CONSTANT, Some((position, false))) => calls.push(*position),
            _ => {}
        }
    }
    calls
}

/// Size of the frame in bytes: the distance from the frame pointer down to the lowest address that the code computes or
/// uses.
fn frame(code: &[Instruction]) -> u32 {
    // Per register: its distance from the frame pointer, if it points into the frame.
    let mut distances = [None; 16];
    let mut lowest = 0;
    for instruction in code {
        let Instruction { code, to, from, offset, constant } = *instruction;
        distances[usize::from(FRAME_POINTER)] = Some(0i32);
        let (base, distance) = match code & 7 {
            1 => (from, i32::from(offset)),
            2 | 3 => (to, i32::from(offset)),
            _ if code == ADD_CONSTANT => (to, constant),
            _ => (FRAME_POINTER, 0),
        };
        let used = distances[usize::from(base)].map(|known| known + distance);
        lowest = lowest.min(used.unwrap_or_default());
        match (code & 7, code) {
            (7, ADD_CONSTANT) => distances[usize::from(to)] = used,
            (7, MOVE) => distances[usize::from(to)] = distances[usize::from(from)],
            (0 | 1 | 4 | 7, _) => distances[usize::from(to)] = None,
            (_, CALL) => distances[..6].fill(None),
            _ => {}
        }
    }
    lowest.unsigned_abs()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn function(name: &str, frame: u32, calls: &[Position]) -> Function {
        Function { name: name.to_owned(), frame, calls: calls.to_vec() }
    }

    #[test]
    fn deepest_chain_counts_whole_units() {
        let functions = BTreeMap::from([
            ((1, 0), function("program", 33, &[(2, 0), (2, 8)])),
            ((2, 0), function("small", 0, &[(2, 16)])),
            ((2, 8), function("large", 160, &[])),
            ((2, 16), function("leaf", 129, &[])),
        ]);
        let chain = deepest_of(&functions).unwrap();
        assert_eq!(chain.bytes, 64 + 32 + 160);
        assert_eq!(chain.functions, ["program (33)", "small (0)", "leaf (129)"]);
        assert_eq!(deepest_of(&BTreeMap::new()), None);
    }

    #[test]
    fn frame_ends_at_the_lowest_address() {
        let code = |bytes: &[[u8; 8]]| bytes.iter().map(|bytes| Instruction::read(bytes)).collect::<Vec<_>>();
        // *(u64 *)(r10 - 16) = r1; r2 = r10; r2 += -40; *(u64 *)(r2 + 8) = r1; r2 = 0; r2 += -400
        let code = code(&[
            [0x7b, 0x1a, 0xf0, 0xff, 0, 0, 0, 0],
            [0xbf, 0xa2, 0, 0, 0, 0, 0, 0],
            [0x07, 0x02, 0, 0, 0xd8, 0xff, 0xff, 0xff],
            [0x7b, 0x12, 8, 0, 0, 0, 0, 0],
            [0xb7, 0x02, 0, 0, 0, 0, 0, 0],
            [0x07, 0x02, 0, 0, 0x70, 0xfe, 0xff, 0xff],
        ]);
        assert_eq!(frame(&code), 40);
        assert_eq!(frame(&code[..1]), 16);
        assert_eq!(frame(&[]), 0);
    }

    #[test]
    fn calls_are_relative_or_relocated() {
        let call =
            |constant: i32| Instruction { code: CALL, to: 0, from: CALL_OF_FUNCTION, offset: 0, constant };
        let helper = Instruction { from: 0, ..call(1) };
        let targets = BTreeMap::from([(8, ((3, 0), true)), (16, ((4, 80), false))]);
        let code = [call(4), call(1), call(-1), helper];
        assert_eq!(calls(&code, 2, 0, &targets), [(2, 40), (3, 16), (4, 80)]);
    }
}
