//! The bytes of the PROXY protocol, version 2 ([specification]), and the changes of TCP headers that it requires.
//! [`rules::proxy_protocol`](crate::rules::proxy_protocol) decides which change a segment needs.
//!
//! [specification]: https://www.haproxy.org/download/3.2/doc/proxy-protocol.txt

use lb_common::conntrack::{
    Tuple,
    tcp_flags::{FIN, PSH, URG},
};

use crate::parse::{bounds::masked, frame::lengths};

/// The first 12 bytes of each header.
const SIGNATURE: [u8; 12] = *b"\r\n\r\n\0\r\nQUIT\n";
/// Version 2, and the command PROXY: the connection is relayed.
const VERSION_AND_COMMAND: u8 = 0x21;
/// The family and protocol of a connection with IPv4 addresses: TCP over IPv4.
const TCP4: u8 = 0x11;
/// The family and protocol of a connection with IPv6 addresses: TCP over IPv6.
const TCP6: u8 = 0x21;
/// Number of bytes before the addresses.
const START: u32 = 16;

/// Length in bytes of a header with IPv4 addresses.
pub const LENGTH_V4: u32 = START + 12;
/// Length in bytes of a header with IPv6 addresses, the longest one.
pub const LENGTH_V6: u32 = START + 36;
/// [`LENGTH_V6`] as the size of an array.
pub const LONGEST: usize = LENGTH_V6 as usize;

/// Length in bytes of the header of a connection whose client has an address of this family.
#[inline(always)]
pub const fn length(is_v4: bool) -> u32 {
    if is_v4 { LENGTH_V4 } else { LENGTH_V6 }
}

/// Writes the header for a connection from `tuple.source` to `tuple.destination`, as the client sees both; the first
/// [`length`] bytes are valid.
#[inline(always)]
pub fn write(header: &mut [u8; LONGEST], tuple: &Tuple) {
    let is_v4 = tuple.source.is_v4();
    header[..12].copy_from_slice(&SIGNATURE);
    header[12] = VERSION_AND_COMMAND;
    header[14] = 0;
    let (source, destination) = (tuple.source_port.to_be_bytes(), tuple.destination_port.to_be_bytes());
    if is_v4 {
        (header[13], header[15]) = (TCP4, 12);
        header[16..20].copy_from_slice(&tuple.source.v4_bytes());
        header[20..24].copy_from_slice(&tuple.destination.v4_bytes());
        header[24..26].copy_from_slice(&source);
        header[26..28].copy_from_slice(&destination);
        header[28..].fill(0);
    } else {
        (header[13], header[15]) = (TCP6, 36);
        header[16..32].copy_from_slice(tuple.source.bytes());
        header[32..48].copy_from_slice(tuple.destination.bytes());
        header[48..50].copy_from_slice(&source);
        header[50..].copy_from_slice(&destination);
    }
}

/// Length in bytes of the longest TCP header.
pub const TCP_LONGEST: u32 = 60;

/// A TCP header with its options; the bytes after its end are 0. The array is longer than any header: programs mask
/// offsets to six bits, and two numbers of 4 bytes fit behind each such offset. This proves to the verifier that every
/// access is within the array.
pub type TcpBytes = [u8; OFFSETS as usize + 8];

/// Number of offsets that a mask of six bits allows.
const OFFSETS: u32 = 64;
const _: () = assert!(TCP_LONGEST <= OFFSETS);
const MASK: u32 = OFFSETS - 1;

/// Offset of the sequence number.
pub const SEQ: usize = 4;
/// Offset of the acknowledgement number.
const ACK: usize = 8;
const FLAGS: usize = 13;
const WINDOW: usize = 14;
const CHECKSUM: usize = 16;
const URGENT: usize = 18;

/// The option End of Option List, RFC 9293 §3.2.
const END: u8 = 0;
/// The option No-Operation, RFC 9293 §3.2.
const NOP: u8 = 1;
/// The option SACK, RFC 2018 §3.
const SACK: u8 = 5;
/// The option TCP Fast Open, RFC 7413 §4.1.1.
const FAST_OPEN: u8 = 34;
/// A change of a TCP header. `ShiftSeq`, `ShiftAck`, `SetAck` and `NarrowWindow` take a number, which the other changes
/// ignore.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum HeaderChange {
    /// Adds the number to the sequence number.
    ShiftSeq = 0,
    /// Subtracts the number from the acknowledgement number, and from the edges of selective acknowledgements.
    ShiftAck = 1,
    /// Replaces the acknowledgement number by the given number, and removes selective acknowledgements.
    SetAck = 2,
    /// Subtracts the number from the window of a SYN-ACK. The window of a segment with SYN is never scaled (RFC 7323
    /// §2.2).
    NarrowWindow = 3,
    /// Removes TCP Fast Open from a SYN: data in a SYN would come before the PROXY protocol header.
    RemoveFastOpen = 4,
    /// Turns the TCP header into the header of a segment that carries the PROXY protocol header: sets PSH, and clears
    /// FIN, URG and the urgent pointer.
    Carry = 5,
    /// Leaves the header as it is.
    Nothing = 6,
}

/// Applies the [`HeaderChange`] with this value to the fixed part of a header; [`Options`] applies it to the options.
/// (A BPF subprogram takes no enum: the verifier knows only that the argument is a number.)
#[inline(always)]
pub fn change(header: &mut TcpBytes, change: u32, by: u32) {
    if change == HeaderChange::ShiftSeq as u32 {
        shift(header, SEQ, by);
    } else if change == HeaderChange::ShiftAck as u32 {
        shift(header, ACK, by.wrapping_neg());
    } else if change == HeaderChange::SetAck as u32 {
        header[ACK..ACK + 4].copy_from_slice(&by.to_be_bytes());
    } else if change == HeaderChange::NarrowWindow as u32 {
        narrow(header, by);
    } else if change == HeaderChange::Carry as u32 {
        header[FLAGS] = header[FLAGS] & !(FIN | URG) | PSH;
        header[URGENT..URGENT + 2].fill(0);
    }
}

/// Adds to the sequence or acknowledgement number at `offset`. (The function cannot panic: a BPF program must not.)
#[inline(always)]
fn shift(header: &mut TcpBytes, offset: usize, by: u32) {
    if let Some(number) = header.get_mut(offset..).and_then(|rest| rest.first_chunk_mut::<4>()) {
        *number = u32::from_be_bytes(*number).wrapping_add(by).to_be_bytes();
    }
}

/// See [`HeaderChange::NarrowWindow`].
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "a window of 16 bits only becomes smaller")]
fn narrow(header: &mut TcpBytes, by: u32) {
    let window = u32::from(u16::from_be_bytes([header[WINDOW], header[WINDOW + 1]])).saturating_sub(by);
    header[WINDOW..WINDOW + 2].copy_from_slice(&(window as u16).to_be_bytes());
}

/// Sets the checksum to 0, so that a sum over the header covers only the other fields.
#[inline(always)]
pub fn clear_checksum(header: &mut TcpBytes) {
    header[CHECKSUM..CHECKSUM + 2].fill(0);
}

/// Applies a [`HeaderChange`] to the options of a header, step by step, so that a program can make the steps in a
/// `bpf_loop`. Each step handles an option, or a byte of the option that is removed.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Offset of the next option, or of the next byte to overwrite.
    at: u32,
    /// Offset of the end of the header.
    end: u32,
    /// Number of bytes that are still to be overwritten with No-Operations; 0 while the option is not found.
    left: u32,
    /// The kind of the option to find; [`END`] if there is none.
    kind: u32,
    /// What to subtract from the sequence numbers in the option; 0 means that the option is removed.
    by: u32,
}

impl Options {
    /// The most steps that a caller makes: one for each byte that options can have, and one that finds the option to
    /// remove.
    pub const STEPS: u32 = TCP_LONGEST - lengths::TCP + 1;

    /// Prepares to apply the [`HeaderChange`] with this value to the options of a header of `length` bytes.
    #[inline(always)]
    pub const fn new(change: u32, length: u32, by: u32) -> Self {
        let shifts = change == HeaderChange::ShiftAck as u32;
        let kind = if shifts || change == HeaderChange::SetAck as u32 {
            SACK
        } else if change == HeaderChange::RemoveFastOpen as u32 {
            FAST_OPEN
        } else {
            END
        };
        Self { at: lengths::TCP, end: length, left: 0, kind: kind as u32, by: if shifts { by } else { 0 } }
    }

    /// Makes one step; returns whether it was the last one. An option that reaches beyond the header ends the search,
    /// as in Linux.
    #[inline(always)]
    pub fn step(&mut self, header: &mut TcpBytes) -> bool {
        let at = masked::<MASK>(self.at) as usize;
        if self.left > 0 {
            if let Some(byte) = header.get_mut(at) {
                *byte = NOP;
            }
            self.at += 1;
            self.left -= 1;
            return self.left == 0;
        }
        if self.kind == u32::from(END) || self.at + 2 > self.end {
            return true;
        }
        let Some([found, size]) = header.get(at..).and_then(|rest| rest.first_chunk::<2>().copied()) else {
            return true;
        };
        let size = u32::from(size);
        match found {
            END => return true,
            NOP => self.at += 1,
            _ if size < 2 || self.at + size > self.end => return true,
            _ if u32::from(found) != self.kind => self.at += size,
            _ if self.by == 0 => self.left = size,
            _ => {
                shift_blocks(header, self.at, size, self.by);
                return true;
            }
        }
        false
    }
}

/// The most blocks of a SACK option.
const MOST_BLOCKS: u32 = 4;

/// Subtracts from both edges of each selective acknowledgement in the option of `size` bytes at `start`.
///
/// A block that reports a retransmitted PROXY protocol header (RFC 2883) then names bytes before the client's first
/// byte; the client ignores such a block.
#[inline(always)]
fn shift_blocks(header: &mut TcpBytes, start: u32, size: u32, by: u32) {
    for block in 0..MOST_BLOCKS {
        let offset = 2 + 8 * block;
        if offset + 8 > size {
            return;
        }
        let at = masked::<MASK>(start + offset) as usize;
        shift(header, at, by.wrapping_neg());
        shift(header, at + 4, by.wrapping_neg());
    }
}

#[cfg(test)]
mod tests {
    use std::{vec, vec::Vec};

    use lb_common::{Address, protocol::TCP};
    use proptest::prelude::*;

    use super::*;

    fn header(options: &[u8]) -> (TcpBytes, u32) {
        let mut header = [0; size_of::<TcpBytes>()];
        header[20..20 + options.len()].copy_from_slice(options);
        (header, 20 + u32::try_from(options.len()).unwrap())
    }

    #[test]
    fn header_is_that_of_the_specification() {
        let mut bytes = [0xff; LONGEST];
        let (client, vip) = (Address::from_v4([192, 0, 2, 1]), Address::from_v4([198, 51, 100, 7]));
        write(&mut bytes, &Tuple::new(client, vip, 0x1234, 443, TCP));
        let expected = b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c\xc0\0\x02\x01\xc6\x33\x64\x07\x12\x34\x01\xbb";
        assert_eq!((&bytes[..28], length(true)), (&expected[..], 28));
        assert_eq!(bytes[28..], [0; 24]);

        let address = |last| Address::from_v6([0x20, 1, 0xd, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, last]);
        write(&mut bytes, &Tuple::new(address(1), address(7), 0x1234, 443, TCP));
        let expected = [
            &b"\r\n\r\n\0\r\nQUIT\n\x21\x21\0\x24"[..],
            address(1).bytes(),
            address(7).bytes(),
            &[0x12, 0x34, 1, 0xbb],
        ]
        .concat();
        assert_eq!((&bytes[..], length(false)), (&expected[..], 52));
    }

    fn apply(header: &mut TcpBytes, what: HeaderChange, length: u32, by: u32) {
        change(header, what as u32, by);
        let mut options = Options::new(what as u32, length, by);
        for _ in 0..Options::STEPS {
            if options.step(header) {
                return;
            }
        }
    }

    #[test]
    fn numbers_wrap_around_and_windows_do_not() {
        let (mut header, length) = header(&[]);
        apply(&mut header, HeaderChange::SetAck, length, 20);
        apply(&mut header, HeaderChange::ShiftAck, length, 28);
        apply(&mut header, HeaderChange::ShiftSeq, length, 52);
        assert_eq!((&header[4..8], &header[8..12]), (&[0, 0, 0, 52][..], &[0xff, 0xff, 0xff, 0xf8][..]));
        for (window, left) in [(0_u16, 0), (27, 0), (28, 0), (65_535, 65_507_u16)] {
            header[14..16].copy_from_slice(&window.to_be_bytes());
            apply(&mut header, HeaderChange::NarrowWindow, length, 28);
            assert_eq!(header[14..16], left.to_be_bytes(), "{window}");
        }
    }

    #[test]
    fn fast_open_is_removed() {
        for (options, expected) in [
            (vec![34, 2], Some(vec![1, 1])),
            (vec![1, 34, 4, 9, 9, 1], Some(vec![1; 6])),
            (vec![2, 4, 5, 0xb4, 34, 6, 7, 7, 7, 7], Some(vec![2, 4, 5, 0xb4, 1, 1, 1, 1, 1, 1])),
            ([vec![1; 38], vec![34, 2]].concat(), Some(vec![1; 40])),
            (vec![254, 2], None),
            (vec![0, 34, 2], None),
            (vec![34, 9], None),
            (vec![34], None),
            (vec![5, 0, 34, 2], None),
        ] {
            let (mut bytes, length) = header(&options);
            apply(&mut bytes, HeaderChange::RemoveFastOpen, length, 0);
            let after = expected.unwrap_or_else(|| options.clone());
            assert_eq!(bytes[20..20 + options.len()], after, "{options:?}");
        }
    }

    #[test]
    fn selective_acknowledgements_are_shifted_or_removed() {
        let block = |start: u32, end: u32| [start.to_be_bytes(), end.to_be_bytes()].concat();
        let timestamps = [1, 1, 8, 10, 1, 2, 3, 4, 5, 6, 7, 8, 1, 1];
        for blocks in 1..=3_u32 {
            let of = |by: u32| -> Vec<u8> {
                let edges =
                    (0..blocks).map(|n| block((100 * n).wrapping_sub(by), (100 * n + 50).wrapping_sub(by)));
                let size = u8::try_from(2 + 8 * blocks).unwrap();
                [&timestamps[..], &[5, size], &edges.collect::<Vec<_>>().concat()].concat()
            };
            let (mut shifted, length) = header(&of(0));
            let mut removed = shifted;
            apply(&mut shifted, HeaderChange::ShiftAck, length, 28);
            assert_eq!(shifted[20..length as usize], of(28));
            apply(&mut removed, HeaderChange::SetAck, length, 0);
            assert_eq!(removed[20..34], timestamps);
            assert!(removed[34..length as usize].iter().all(|byte| *byte == NOP));
        }
    }

    #[test]
    fn carrier_is_pushed_and_keeps_only_what_it_may() {
        let (mut bytes, length) = header(&[]);
        bytes[FLAGS] = 0xf1;
        bytes[CHECKSUM..URGENT + 2].fill(7);
        apply(&mut bytes, HeaderChange::Carry, length, 0);
        assert_eq!((bytes[FLAGS], &bytes[16..20]), (0xd8, &[7, 7, 0, 0][..]), "ACK and ECN stay");
        clear_checksum(&mut bytes);
        assert_eq!(bytes[16..20], [0; 4]);
    }

    proptest! {
        /// The programs run this code on whatever options clients and backends send.
        #[test]
        fn any_options_are_handled(
            options in proptest::collection::vec(prop_oneof![Just(5_u8), Just(34), Just(1), Just(10), any::<u8>()], 0..=40),
        ) {
            let (bytes, length) = header(&options);
            let mut changed = bytes;
            for (change, by) in [
                (HeaderChange::RemoveFastOpen, 0),
                (HeaderChange::ShiftAck, 52),
                (HeaderChange::SetAck, 52_u32.wrapping_neg()),
            ] {
                apply(&mut changed, change, length, by);
            }
            prop_assert_eq!(changed[..8].to_vec(), bytes[..8].to_vec());
            prop_assert_eq!(changed[12..20].to_vec(), bytes[12..20].to_vec());
            prop_assert_eq!(changed[length as usize..].to_vec(), bytes[length as usize..].to_vec());
        }
    }
}
