/// The fields of a TCP header that describe the connection; or the first chunk of an SCTP packet, in the terms of TCP:
/// see [`Segment::of_chunk`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The flag byte of the header: see [`tcp_flags`].
    pub flags: u8,
    /// Sequence number of the segment's first byte.
    pub seq: u32,
    /// Acknowledgement number; meaningful with ACK.
    pub ack: u32,
    /// TCP: bytes of payload. SCTP: bytes of the whole packet.
    pub payload: u32,
}

/// Types of SCTP chunks that begin or end an association, RFC 9260 §3.2.
pub mod chunk {
    /// The chunk INIT requests an association.
    pub const INIT: u8 = 1;
    /// The chunk INIT-ACK accepts an association.
    pub const INIT_ACK: u8 = 2;
    /// The chunk ABORT ends an association at once.
    pub const ABORT: u8 = 6;
    /// No more data from the sender.
    pub const SHUTDOWN: u8 = 7;
    /// No more data from the receiver of a SHUTDOWN either.
    pub const SHUTDOWN_ACK: u8 = 8;
}

/// Flag bits of the TCP header, RFC 9293 §3.1.
pub mod tcp_flags {
    /// No more data from the sender.
    pub const FIN: u8 = 1;
    /// The segment begins a connection, or accepts one: it sets the sender's first sequence number.
    pub const SYN: u8 = 2;
    /// The segment ends the connection at once.
    pub const RST: u8 = 4;
    /// The receiver should hand the bytes to its application at once.
    pub const PSH: u8 = 8;
    /// The acknowledgement number is valid.
    pub const ACK: u8 = 16;
    /// The urgent pointer is valid.
    pub const URG: u8 = 32;
    /// The flags that decide whether a segment is valid: all but PSH and those of ECN.
    pub(super) const CONSIDERED: u8 = FIN | SYN | RST | ACK | URG;
}

impl Segment {
    /// An SCTP packet of `length` bytes with verification tag `tag`, whose first chunk is of type `kind`.
    #[inline(always)]
    pub const fn of_chunk(kind: u8, tag: u32, length: u32) -> Self {
        let flags = match kind {
            chunk::INIT => tcp_flags::SYN,
            chunk::INIT_ACK => tcp_flags::SYN | tcp_flags::ACK,
            chunk::ABORT => tcp_flags::RST | tcp_flags::ACK,
            chunk::SHUTDOWN | chunk::SHUTDOWN_ACK => tcp_flags::FIN | tcp_flags::ACK,
            _ => tcp_flags::ACK,
        };
        Self { flags, seq: tag, ack: 0, payload: length }
    }

    /// Whether the segment requests a new connection: SYN without ACK, or INIT.
    #[inline(always)]
    pub const fn is_syn(&self) -> bool {
        self.flags & (tcp_flags::SYN | tcp_flags::ACK | tcp_flags::RST) == tcp_flags::SYN
    }

    /// Whether the segment accepts a new connection: SYN with ACK, or INIT ACK.
    #[inline(always)]
    pub const fn is_syn_ack(&self) -> bool {
        self.flags & (tcp_flags::SYN | tcp_flags::ACK | tcp_flags::RST) == tcp_flags::SYN | tcp_flags::ACK
    }

    /// Whether the segment resets the connection: a RST of TCP, or an ABORT of SCTP, which has the same flag here.
    #[inline(always)]
    pub const fn is_rst(&self) -> bool {
        self.flags & tcp_flags::RST != 0
    }

    /// Whether the segment may begin a flow, or end it at once: SYN (with or without ACK) or RST.
    #[inline(always)]
    pub const fn is_syn_or_rst(&self) -> bool {
        self.flags & (tcp_flags::SYN | tcp_flags::RST) != 0
    }

    /// Whether the segment is from the middle of a flow: it has ACK, but not SYN, FIN or RST. (Such a combination is
    /// always [valid](Self::is_valid).)
    #[inline(always)]
    pub const fn continues(&self) -> bool {
        use tcp_flags::{ACK, FIN, RST, SYN};
        self.flags & (FIN | SYN | RST | ACK) == ACK
    }

    /// Whether RFC 9293 lets a sender combine these flags, by the list of netfilter (`tcp_valid_flags`). Other
    /// combinations are forged or sent by scanners: for example no SYN, ACK or RST at all, or SYN or RST with FIN.
    #[inline(always)]
    pub const fn is_valid(&self) -> bool {
        // One bit for each valid combination, so that a program takes one branch.
        const VALID: u64 = {
            use tcp_flags::{ACK, FIN, RST, SYN, URG};
            1 << SYN
                | 1 << (SYN | URG)
                | 1 << (SYN | ACK)
                | 1 << RST
                | 1 << (RST | ACK)
                | 1 << (FIN | ACK)
                | 1 << (FIN | ACK | URG)
                | 1 << ACK
                | 1 << (ACK | URG)
        };
        VALID >> (self.flags & tcp_flags::CONSIDERED) & 1 != 0
    }

    /// The sequence number after this segment: SYN and FIN count as one byte each.
    #[inline(always)]
    pub const fn end(&self) -> u32 {
        let syn = (self.flags & tcp_flags::SYN != 0) as u32;
        let fin = (self.flags & tcp_flags::FIN != 0) as u32;
        self.seq.wrapping_add(self.payload).wrapping_add(syn).wrapping_add(fin)
    }
}

#[cfg(test)]
mod tests {
    use super::{
        Segment, tcp_flags,
        tcp_flags::{ACK, FIN, RST, SYN, URG},
    };

    #[test]
    fn valid_flags_are_those_of_netfilter() {
        // `tcp_valid_flags` in net/netfilter/nf_conntrack_proto_tcp.c.
        let valid = [SYN, SYN | URG, SYN | ACK, RST, RST | ACK, FIN | ACK, FIN | ACK | URG, ACK, ACK | URG];
        for flags in 0..=u8::MAX {
            let segment = Segment { flags, seq: 0, ack: 0, payload: 0 };
            let considered = flags & tcp_flags::CONSIDERED;
            assert_eq!(segment.is_valid(), valid.contains(&considered), "{flags:#x}");
            assert!(segment.is_valid() || !segment.continues(), "{flags:#x}");
        }
    }
}
