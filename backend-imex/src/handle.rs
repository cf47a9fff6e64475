//! A fabric handle as a locator's endpoint: base64, in the alphabet of URLs, without padding.

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use flashboot_core::{Error, Kind, Locator, Result};

/// Bytes of a handle (`CUmemFabricHandle`).
pub(crate) const LEN: usize = 64;
/// Characters of one.
const TEXT: usize = (LEN * 4).div_ceil(3);

pub(crate) fn encode(handle: &[u8; LEN]) -> String {
    URL_SAFE_NO_PAD.encode(handle)
}

/// The handle in `locator`.
///
/// # Errors
/// [`Kind::Corrupt`] when there is none.
pub(crate) fn decode(locator: &Locator) -> Result<[u8; LEN]> {
    let text = &locator.endpoint;
    let bytes = if text.len() == TEXT { URL_SAFE_NO_PAD.decode(text).ok() } else { None };
    bytes.and_then(|bytes| bytes.try_into().ok()).ok_or_else(|| {
        let detail = format!("the locator's endpoint of {} bytes is no fabric handle", text.len());
        Error::new(Kind::Corrupt, "import", detail).with_remedy("fetch the locator from its exporter again")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashboot_core::{Generation, Location, TransportName};

    fn locator(endpoint: String) -> Locator {
        Locator {
            transport: TransportName::Imex,
            generation: Generation::from_random(1),
            payload: 1,
            capacity: 2 << 20,
            shards: 1,
            location: Location::Gpu { boot_id: "b".into(), uuid: "GPU-0".into() },
            endpoint,
        }
    }

    #[test]
    fn a_handle_reads_back_and_nothing_else_is_one() {
        let handle = std::array::from_fn(|at| (at * 7) as u8);
        let text = encode(&handle);
        assert_eq!(decode(&locator(text.clone())).unwrap(), handle);
        let wrong = ["", "x", &text[1..], &format!("{text}A"), &text.replace('A', "!"), &"=".repeat(TEXT)];
        for wrong in wrong {
            assert_eq!(decode(&locator(wrong.to_owned())).unwrap_err().kind(), Kind::Corrupt, "{wrong}");
        }
    }
}
