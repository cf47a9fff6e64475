//! Which of a port's addresses to send from.

use crate::verbs::{Gid, GidKind, LinkLayer};
use std::net::Ipv6Addr;

/// Lower is better. `None`: never.
fn rank(gid: &Gid, link: LinkLayer) -> Option<u8> {
    if gid.bytes == [0; 16] {
        return None;
    }
    let address = Ipv6Addr::from(gid.bytes);
    let local = address.segments().first().is_some_and(|s| s & 0xffc0 == 0xfe80)
        || address.to_ipv4_mapped().is_some_and(|v4| v4.is_link_local() || v4.is_loopback())
        || address.is_loopback();
    match (link, gid.kind) {
        (LinkLayer::Ethernet, GidKind::RoceV2) => Some(u8::from(local)),
        (LinkLayer::Ethernet, GidKind::RoceV1) => Some(2 + u8::from(local)),
        (LinkLayer::Infiniband, GidKind::Infiniband) => Some(0),
        _ => None,
    }
}

/// The GID at `wanted`, or the best of the table: RoCE v2 before v1, routable before link-local, then the lowest index.
/// `table` has the valid entries only; their indices may have holes.
pub(crate) fn choose(table: &[Gid], link: LinkLayer, wanted: Option<u8>) -> Result<Gid, String> {
    if let Some(index) = wanted {
        let found = table.iter().find(|gid| gid.index == u32::from(index)).copied();
        return found.filter(|gid| rank(gid, link).is_some()).ok_or_else(|| {
            let there: Vec<_> = table.iter().map(|gid| gid.index.to_string()).collect();
            format!("the GID at index {index} is not there (there are: {})", there.join(", "))
        });
    }
    let usable = table.iter().filter(|gid| u8::try_from(gid.index).is_ok());
    usable
        .filter_map(|gid| Some(((rank(gid, link)?, gid.index), *gid)))
        .min_by_key(|(key, _)| *key)
        .map(|(_, gid)| gid)
        .ok_or_else(|| "the port has no GID to send from".to_owned())
}

/// As people read it.
pub(crate) fn text(bytes: [u8; 16]) -> String {
    let address = Ipv6Addr::from(bytes);
    address.to_ipv4_mapped().map_or_else(|| address.to_string(), |v4| v4.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gid(index: u32, kind: GidKind, address: &str) -> Gid {
        let bytes = match address.parse::<std::net::IpAddr>().unwrap() {
            std::net::IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
            std::net::IpAddr::V6(v6) => v6.octets(),
        };
        Gid { index, kind, bytes }
    }

    #[test]
    fn a_routable_roce_v2_address_comes_first_and_holes_do_no_harm() {
        use GidKind::{RoceV1, RoceV2};
        let table = [
            gid(0, RoceV1, "fe80::1"),
            gid(1, RoceV2, "fe80::1"),
            gid(4, RoceV1, "10.0.0.1"),
            gid(7, RoceV2, "10.0.0.1"),
            gid(9, RoceV2, "2001:db8::1"),
        ];
        let choose = |table: &[Gid], wanted| choose(table, LinkLayer::Ethernet, wanted).map(|gid| gid.index);
        assert_eq!(choose(&table, None), Ok(7));
        assert_eq!(choose(&table[..3], None), Ok(1), "v2 before v1, even link-local");
        assert_eq!(choose(&table[..1], None), Ok(0));
        assert_eq!(choose(&table, Some(9)), Ok(9));
        assert!(choose(&table, Some(2)).unwrap_err().contains("0, 1, 4, 7, 9"));
        assert!(choose(&[], None).is_err());
        assert!(choose(&[gid(0, RoceV2, "::")], None).is_err(), "the zero GID is none");
        assert_eq!(choose(&[gid(300, RoceV2, "10.0.0.1"), gid(3, RoceV1, "10.0.0.1")], None), Ok(3));
    }

    #[test]
    fn infiniband_and_ethernet_are_kept_apart() {
        let ib = [gid(0, GidKind::Infiniband, "fe80::2")];
        assert!(choose(&ib, LinkLayer::Infiniband, None).is_ok());
        assert!(choose(&ib, LinkLayer::Ethernet, None).is_err());
        assert_eq!(text(gid(0, GidKind::RoceV2, "10.77.0.1").bytes), "10.77.0.1");
    }
}
