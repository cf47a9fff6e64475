//! Which image is meant: an id is 64 hexadecimal digits, and the first of them do where they are of one image only.

use flashboot_core::{Error, Kind, Result};
use flashboot_rendezvous::{Client, protocol::Wanted, status};
use std::collections::BTreeSet;

/// Digits of an image's id.
const ID: usize = 64;
/// The fewest that are taken for the beginning of one.
const FEWEST: usize = 8;
/// The most images that an error names.
const NAMED: usize = 4;

/// Reads an image's id, or its beginning.
///
/// # Errors
/// [`Kind::Invalid`], saying what an id is.
pub fn image_id(text: &str) -> Result<String> {
    let digits = text.bytes().all(|b| b.is_ascii_hexdigit());
    if digits && (FEWEST..=ID).contains(&text.len()) {
        return Ok(text.to_ascii_lowercase());
    }
    let shown: String = text.chars().take(ID + 8).collect();
    let detail =
        format!("`{shown}` is no image's id: that is {ID} hexadecimal digits, or the first {FEWEST} or more");
    Err(Error::new(Kind::Invalid, "image", detail)
        .with_remedy("take it from `flashboot inspect IMAGE` or `flashboot status`, or ask by --model"))
}

/// `wanted` with a whole id in place of the beginning of one. Who asks by a beginning believes the service which image that is.
pub(super) async fn resolved(wanted: &Wanted, client: &Client) -> Result<Wanted> {
    let Some(asked) = &wanted.image else { return Ok(wanted.clone()) };
    let asked = image_id(asked)?;
    if asked.len() == ID {
        return Ok(Wanted { image: Some(asked), ..wanted.clone() });
    }
    let status = status(client).await?;
    let live = status.members.iter().filter_map(|m| status.contents.get(m.content));
    let found: BTreeSet<_> =
        live.map(|content| &content.image).filter(|image| image.starts_with(&asked)).collect();
    match one_of(&asked, &found) {
        Ok(image) => Ok(Wanted { image: Some(image), ..wanted.clone() }),
        Err(error) => Err(error.with_peer(client.peer())),
    }
}

fn one_of(asked: &str, found: &BTreeSet<&String>) -> Result<String> {
    only(asked, found)?.ok_or_else(|| {
        Error::new(Kind::Unavailable, "image", format!("nobody holds an image `{asked}…`"))
            .with_remedy("start a seed of it, or ask by all 64 digits, which are waited for")
    })
}

/// The only one of `found`, which all begin so; `None` where there is none.
///
/// # Errors
/// [`Kind::Invalid`] where there are several, by their names.
pub(crate) fn only(asked: &str, found: &BTreeSet<&String>) -> Result<Option<String>> {
    let mut images = found.iter();
    match (images.next(), images.next()) {
        (first, None) => Ok(first.map(|only| (*only).clone())),
        _ => {
            let named: Vec<_> = found.iter().take(NAMED).map(|image| image.as_str()).collect();
            let detail = format!("`{asked}` begins the ids of {} images: {}", found.len(), named.join(", "));
            Err(Error::new(Kind::Invalid, "image", detail).with_remedy("say which, with more digits"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_hexadecimal_and_not_too_short() {
        let whole = "0123456789abcdef".repeat(4);
        assert_eq!(image_id(&whole.to_uppercase()), Ok(whole.clone()));
        assert_eq!(image_id(&whole[..8]), Ok(whole[..8].to_owned()));
        for bad in ["", "zzz", "abc", "0123456", "0123456g", &format!("{whole}0"), "…………"] {
            let refused = image_id(bad).unwrap_err();
            assert_eq!(refused.kind(), Kind::Invalid, "{bad}");
            assert!(refused.remedy().is_some_and(|remedy| remedy.contains("flashboot status")), "{refused}");
        }
    }

    #[test]
    fn a_beginning_is_of_one_image_or_refused_by_name() {
        let (one, two) = ("abcdef01".repeat(8), format!("abcdef01{}", "0".repeat(56)));
        assert_eq!(one_of("abcdef01a", &BTreeSet::from([&one])), Ok(one.clone()));
        let several = one_of("abcdef01", &BTreeSet::from([&one, &two])).unwrap_err();
        assert!(several.detail().contains(&one) && several.detail().contains(&two), "{several}");
        assert_eq!(one_of("abcdef01", &BTreeSet::new()).unwrap_err().kind(), Kind::Unavailable);
    }
}
