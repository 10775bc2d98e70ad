//! Reads the XDP features of drivers from the generic netlink family `netdev` (Linux 6.3 and newer).

use std::io;

use netlink_packet_core::{
    DecodeError, Emitable as _, NetlinkDeserializable, NetlinkHeader, NetlinkSerializable,
};
use netlink_sys::protocols::NETLINK_GENERIC;

use crate::net::{
    attribute::{Attribute, attributes, value},
    netlink::{Message, Netlink},
};

/// Size in bytes of `struct genlmsghdr`; attributes follow it.
const HEADER: usize = 4;

/// Numbers from include/uapi/linux/genetlink.h; `GENL_ID_CTRL` is the family that lists the other families.
const GENL_ID_CTRL: u16 = 0x10;
const CTRL_CMD_GETFAMILY: u8 = 3;
const CTRL_ATTR_FAMILY_ID: u16 = 1;
const CTRL_ATTR_FAMILY_NAME: u16 = 2;

/// Numbers from include/uapi/linux/netdev.h.
const NETDEV_CMD_DEV_GET: u8 = 1;
const NETDEV_A_DEV_IFINDEX: u16 = 1;
const NETDEV_A_DEV_XDP_FEATURES: u16 = 3;

/// Standard MTU of Ethernet: an IP packet of up to this many bytes is in one buffer. A larger packet may be in several
/// buffers (XDP fragments).
const WHOLE: u32 = 1500;

/// What a device's driver does for XDP programs at present: bits of `enum netdev_xdp_act`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct XdpFeatures(u64);

impl XdpFeatures {
    const NDO_XMIT: u64 = 4;
    const NDO_XMIT_SG: u64 = 64;

    /// Whether the driver sends frames that native programs on other devices redirect to it.
    pub(crate) const fn sends_frames(self) -> bool {
        self.0 & Self::NDO_XMIT != 0
    }

    /// Whether the driver sends redirected frames with IP packets of up to `mtu` bytes, including frames in several
    /// buffers (XDP fragments).
    pub(crate) const fn sends_frames_of(self, mtu: u32) -> bool {
        self.sends_frames() && (mtu <= WHOLE || self.0 & Self::NDO_XMIT_SG != 0)
    }
}

/// Reads the XDP features of devices' drivers.
#[derive(Debug)]
pub(crate) struct XdpFeatureReader {
    netlink: Netlink<Generic>,
    /// Number of the generic netlink family `netdev`.
    family: u16,
}

impl XdpFeatureReader {
    /// A reader for the network namespace of this thread; `None` if the kernel does not report XDP features (before
    /// 6.3).
    pub(crate) fn open() -> io::Result<Option<Self>> {
        let mut netlink = Netlink::open()?;
        Ok(find_family(&mut netlink)?.map(|family| Self { netlink, family }))
    }

    /// The XDP features of a device; `None` if there is no device with this index, or the kernel does not report its
    /// features.
    pub(crate) fn read(&mut self, index: u32) -> io::Result<Option<XdpFeatures>> {
        let index = Attribute::new(NETDEV_A_DEV_IFINDEX, &index.to_ne_bytes());
        let family = self.family;
        let request = Generic { family, command: NETDEV_CMD_DEV_GET, attributes: vec![index] };
        match self.netlink.get(request) {
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(None),
            answers => Ok(answers?.iter().find_map(features)),
        }
    }
}

fn features(answer: &Generic) -> Option<XdpFeatures> {
    let bits = value(&answer.attributes, NETDEV_A_DEV_XDP_FEATURES);
    bits.map(|bits| XdpFeatures(u64::from_ne_bytes(bits)))
}

/// The number of the family `netdev`; `None` if the kernel has no such family.
fn find_family(netlink: &mut Netlink<Generic>) -> io::Result<Option<u16>> {
    let name = Attribute::new(CTRL_ATTR_FAMILY_NAME, b"netdev\0");
    let request = Generic { family: GENL_ID_CTRL, command: CTRL_CMD_GETFAMILY, attributes: vec![name] };
    let answers = match netlink.get(request) {
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(None),
        answers => answers?,
    };
    let id = answers.iter().find_map(|answer| value(&answer.attributes, CTRL_ATTR_FAMILY_ID));
    Ok(id.map(u16::from_ne_bytes))
}

/// A message of generic netlink, in the form that this reader needs.
#[derive(Clone, Debug)]
struct Generic {
    family: u16,
    command: u8,
    attributes: Vec<Attribute>,
}

impl NetlinkSerializable for Generic {
    fn message_type(&self) -> u16 {
        self.family
    }

    fn buffer_len(&self) -> usize {
        HEADER + self.attributes.as_slice().buffer_len()
    }

    fn serialize(&self, buffer: &mut [u8]) {
        const VERSION: u8 = 1;
        let (header, attributes) = buffer.split_at_mut(HEADER);
        header.copy_from_slice(&[self.command, VERSION, 0, 0]);
        self.attributes.as_slice().emit(attributes);
    }
}

impl NetlinkDeserializable for Generic {
    type Error = DecodeError;

    fn deserialize(header: &NetlinkHeader, payload: &[u8]) -> Result<Self, DecodeError> {
        let (&[command, ..], rest) = payload
            .split_first_chunk::<HEADER>()
            .ok_or_else(|| DecodeError::from("a generic netlink message that is too short"))?;
        Ok(Self { family: header.message_type, command, attributes: attributes(rest)? })
    }
}

impl Message for Generic {
    const PROTOCOL: isize = NETLINK_GENERIC;
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Header and attributes that Linux 6.18 reported about a veth whose other end had neither an XDP program nor GRO.
    const VETH: [u8; 48] = [
        1, 1, 0, 0, //
        8, 0, 1, 0, 2, 0, 0, 0, // ifindex
        12, 0, 3, 0, 0x23, 0, 0, 0, 0, 0, 0, 0, // xdp-features: basic, redirect, rx-sg
        12, 0, 5, 0, 7, 0, 0, 0, 0, 0, 0, 0, // xdp-rx-metadata-features
        12, 0, 6, 0, 0, 0, 0, 0, 0, 0, 0, 0, // xsk-features
    ];

    fn parse(payload: &[u8]) -> Result<Generic, DecodeError> {
        Generic::deserialize(&NetlinkHeader::default(), payload)
    }

    #[test]
    #[cfg(target_endian = "little")]
    fn answer_of_the_kernel_has_the_features() {
        let found = features(&parse(&VETH).unwrap()).unwrap();
        assert_eq!(found, XdpFeatures(0x23));
        assert!(!found.sends_frames_of(1500));
        let mut with_gro = VETH;
        with_gro[16] = 0x67;
        let found = features(&parse(&with_gro).unwrap()).unwrap();
        assert!(found.sends_frames_of(9000));
    }

    #[test]
    fn frames_in_fragments_need_a_feature_of_their_own() {
        let features = XdpFeatures(XdpFeatures::NDO_XMIT);
        assert!(features.sends_frames_of(1500) && !features.sends_frames_of(9000));
    }

    #[test]
    fn answers_without_the_features_are_understood() {
        assert!(parse(&VETH[..3]).is_err());
        assert!(parse(&VETH[..20]).is_err(), "the attribute is cut off");
        assert_eq!(features(&parse(&VETH[..12]).unwrap()), None);
    }

    #[test]
    fn request_has_the_layout_of_the_kernel() {
        let index = Attribute::new(NETDEV_A_DEV_IFINDEX, &2_u32.to_ne_bytes());
        let request = Generic { family: 20, command: NETDEV_CMD_DEV_GET, attributes: vec![index] };
        let mut buffer = vec![0; request.buffer_len()];
        request.serialize(&mut buffer);
        let again = parse(&buffer).unwrap();
        assert_eq!((buffer.len(), again.command), (12, NETDEV_CMD_DEV_GET));
        assert_eq!(value(&again.attributes, NETDEV_A_DEV_IFINDEX), Some(2_u32.to_ne_bytes()));
    }
}
