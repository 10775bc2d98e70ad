//! The message and the pcap file of a failed comparison of packets.

use std::{fmt::Write as _, fs, path::PathBuf};

/// Link types of pcap files (<https://www.tcpdump.org/linktypes.html>).
const LINKTYPE_ETHERNET: u32 = 1;
const LINKTYPE_RAW: u32 = 101;

/// Panics unless both packets are equal. The message has hexdumps and the path of a pcap file with three packets:
/// input, output, expected output.
#[track_caller]
pub(crate) fn assert_same_packet(case: &str, ethernet: bool, input: &[u8], found: &[u8], wanted: &[u8]) {
    if found == wanted {
        return;
    }
    let differs = found.iter().zip(wanted).position(|(a, b)| a != b);
    let offset = differs.unwrap_or(found.len().min(wanted.len()));
    let path = write_pcap(case, ethernet, &[input, found, wanted]);
    panic!(
        "{case}: the packets differ from offset {offset} on ({} bytes, {} expected)\nfound:\n{}expected:\n{}\
         input, output and expected output: {}",
        found.len(),
        wanted.len(),
        hexdump(found, wanted),
        hexdump(wanted, found),
        path.display()
    );
}

/// A hexdump with 16 bytes per line; `>` marks bytes that differ from `other`.
fn hexdump(bytes: &[u8], other: &[u8]) -> String {
    let mut text = String::new();
    for (line, chunk) in bytes.chunks(16).enumerate() {
        write!(text, "  {:04x} ", line * 16).unwrap();
        for (column, byte) in chunk.iter().enumerate() {
            let same = other.get(line * 16 + column) == Some(byte);
            write!(text, "{}{byte:02x}", if same { ' ' } else { '>' }).unwrap();
        }
        text.push('\n');
    }
    text
}

fn write_pcap(case: &str, ethernet: bool, packets: &[&[u8]]) -> PathBuf {
    let link_type = if ethernet { LINKTYPE_ETHERNET } else { LINKTYPE_RAW };
    let mut file = Vec::new();
    for word in [0xa1b2_c3d4, 0x0004_0002, 0, 0, 65_535, link_type] {
        file.extend(word.to_ne_bytes());
    }
    for (second, packet) in (0u32..).zip(packets) {
        let length = u32::try_from(packet.len()).unwrap();
        for word in [second, 0, length, length] {
            file.extend(word.to_ne_bytes());
        }
        file.extend(*packet);
    }
    let name: String =
        case.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).take(150).collect();
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}.pcap"));
    fs::write(&path, file).unwrap();
    path
}
