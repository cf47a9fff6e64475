//! What a registration may say at most, and what must agree in it.

use super::{
    member::{Content, MemberId, Place, Registration, Role, Wanted},
    refusal::{Reason, Refusal},
    ring::RingNode,
};
use flashboot_core::Locator;

/// The longest name or label.
const TEXT: usize = 256;
/// The longest trace.
const TRACE: usize = 32;
/// The most locators of one member, and bytes of all of them.
const LOCATORS: usize = 8;
const LOCATOR_BYTES: usize = 16 << 10;
/// The most network devices that are listed.
const NICS: usize = 32;
/// The longest manifest: the table of a million tensors.
pub(super) const MANIFEST: u64 = 256 << 20;

fn malformed(detail: impl Into<String>) -> Refusal {
    Refusal::new(Reason::Malformed, detail)
}

fn text(what: &str, text: &str) -> Result<(), Refusal> {
    if text.len() > TEXT || text.chars().any(char::is_control) {
        return Err(malformed(format!("{what} is longer than {TEXT} bytes, or not printable")));
    }
    Ok(())
}

fn hash(what: &str, text: &str) -> Result<(), Refusal> {
    let digit = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
    if text.len() == 64 && text.bytes().all(digit) {
        return Ok(());
    }
    Err(malformed(format!("{what} is not 64 hexadecimal digits")))
}

fn content(content: &Content) -> Result<(), Refusal> {
    hash("the image's id", &content.image)?;
    hash("the manifest's hash", &content.manifest)?;
    for (what, value) in [("the rank", &content.rank), ("the model", &content.model)] {
        text(what, value)?;
        if value.is_empty() {
            return Err(malformed(format!("{what} has no name")));
        }
    }
    text("the revision", &content.revision)?;
    text("the fingerprint", &content.fingerprint)?;
    if content.manifest_bytes == 0 || content.manifest_bytes > MANIFEST {
        return Err(malformed(format!(
            "a manifest of {} bytes: between 1 and {MANIFEST} are possible",
            content.manifest_bytes
        )));
    }
    Ok(())
}

fn place(place: &Place) -> Result<(), Refusal> {
    text("the host", &place.host)?;
    if place.host.is_empty() || place.nics.len() > NICS {
        return Err(malformed(format!("a place without a host, or with more than {NICS} network devices")));
    }
    for nic in &place.nics {
        text("a network device", nic)?;
    }
    for label in [&place.gpu, &place.domain, &place.rail, &place.rack].into_iter().flatten() {
        text("a label", label)?;
    }
    Ok(())
}

/// What a clone may ask for.
pub(super) fn wanted(wanted: &Wanted) -> Result<(), Refusal> {
    let Wanted { image, model, revision, rank } = wanted;
    if image.is_none() && model.is_none() {
        return Err(malformed("neither an image nor a model is asked for"));
    }
    for value in [image, model, revision, rank].into_iter().flatten() {
        text("what is asked for", value)?;
    }
    Ok(())
}

/// Sizes and numbers of a registration, and that its locators are of its own filling.
pub(super) fn registration(said: &Registration) -> Result<(), Refusal> {
    content(&said.content)?;
    place(&said.place)?;
    if let Some(name) = &said.name {
        text("the name", name)?;
    }
    if let Some(trace) = &said.trace
        && (trace.is_empty() || trace.len() > TRACE || !trace.bytes().all(|b| b.is_ascii_hexdigit()))
    {
        return Err(malformed(format!("a trace is 1 to {TRACE} hexadecimal digits")));
    }
    let bytes = said.content.bytes;
    match said.role {
        Role::Seed if said.holds != bytes => {
            return Err(malformed(format!("a seed that holds {} of {bytes} bytes", said.holds)));
        }
        _ if said.holds > bytes => {
            return Err(malformed(format!("{} bytes held, of {bytes}", said.holds)));
        }
        _ => {}
    }
    if said.expect.is_some_and(|n| n == 0) {
        return Err(malformed("nobody is expected: leave `expect` out"));
    }
    locators(said.member, &said.locators, (bytes, 1))
}

/// What a node of an all-gather may say.
pub(super) fn ring(said: &RingNode) -> Result<(), Refusal> {
    hash("the image's id", &said.image)?;
    text("the rank", &said.rank)?;
    text("the ring's name", &said.name)?;
    place(&said.place)?;
    locators(said.member, &said.locators, (said.bytes, said.nodes))
}

/// That they are few, and of `member`'s own filling: of so many bytes in so many shards.
fn locators(member: MemberId, lines: &[String], (bytes, shards): (u64, u32)) -> Result<(), Refusal> {
    if lines.len() > LOCATORS || lines.iter().map(String::len).sum::<usize>() > LOCATOR_BYTES {
        return Err(malformed(format!("more than {LOCATORS} locators, or {LOCATOR_BYTES} bytes of them")));
    }
    for line in lines {
        let locator: Locator = line.parse().map_err(|e| malformed(format!("a locator: {e}")))?;
        let Locator { transport, generation, .. } = &locator;
        if *generation != member.0 {
            let detail = format!("the {transport} locator is of filling {generation}, not {member}");
            return Err(Refusal::new(Reason::Mismatch, detail));
        }
        if locator.payload != bytes || locator.shards != shards {
            let detail = format!(
                "the {transport} locator is of {} bytes in {} shards, the content of {bytes} in {shards}",
                locator.payload, locator.shards
            );
            return Err(Refusal::new(Reason::Mismatch, detail));
        }
    }
    Ok(())
}
