//! Hello, proof, verdict: the same for both carriers, after TLS where there is TLS.
//!
//! The listener proves itself only to whoever has proved themselves to it.

use crate::{
    auth::{PROOF, Transcript},
    channel::Stream,
    error::{SAME_TLS, failed, speaks_tls},
    hello::{FIXED, Hello, HelloError, LEN, NONCE, Purpose, Role, check_fixed},
    security::Security,
    tls,
};
use flashboot_core::{Error, Kind, Result};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

/// The longest text of a refusal, in bytes.
const MAX_TEXT: usize = 200;
/// Bytes of a verdict before its text: status, length of the text, proof.
const VERDICT: usize = 4 + PROOF;

const ADMITTED: u16 = 0;
const NOT_PERMITTED: u16 = 1;
const OTHER_PURPOSE: u16 = 2;
const IN_CLEAR: u16 = 3;

/// The dialler's side.
pub(crate) async fn dial(
    stream: &mut Stream,
    security: &Security,
    purpose: Purpose,
    peer: &str,
) -> Result<()> {
    let token = security.token();
    let ours = Hello { role: Role::Dialler, purpose, token: token.is_some(), nonce: nonce()? };
    let dialler = ours.encode();
    write(stream, &dialler, "our hello", peer).await?;
    let (listener, theirs) = hello(stream, Role::Listener, peer).await?;
    let said = Transcript { dialler, listener, keying: keying(stream)? };
    if token.is_some() && !theirs.token {
        return Err(Error::new(Kind::Permission, "dial", "we have a token and the exporter has none")
            .with_peer(peer)
            .with_remedy("give both ends the same security.token_file, or neither"));
    }
    let proof = token.map_or([0; PROOF], |token| said.proof(token, Role::Dialler));
    write(stream, &proof, "our proof", peer).await?;

    let mut verdict = [0; VERDICT];
    read(stream, &mut verdict, "the exporter's verdict", peer).await?;
    let [s0, s1, l0, l1, proof @ ..] = verdict;
    let (status, len) = (u16::from_le_bytes([s0, s1]), usize::from(u16::from_le_bytes([l0, l1])));
    if len > MAX_TEXT {
        let detail = format!("a verdict with {len} bytes of text; at most {MAX_TEXT} are taken");
        return Err(Error::new(Kind::Protocol, "dial", detail).with_peer(peer));
    }
    let mut text = vec![0; len];
    read(stream, &mut text, "the exporter's verdict", peer).await?;
    if status != ADMITTED {
        let text: String = String::from_utf8_lossy(&text).chars().filter(|c| !c.is_control()).collect();
        let refused =
            Error::new(refusal_kind(status), "dial", format!("the exporter refused: {text}")).with_peer(peer);
        return Err(match status {
            NOT_PERMITTED => refused.with_remedy("give both ends the same security.token_file"),
            IN_CLEAR => refused.with_remedy(SAME_TLS),
            _ => refused,
        });
    }
    match token {
        Some(token) if !said.proves(token, Role::Listener, proof) => {
            Err(Error::new(Kind::Permission, "dial", "the exporter does not have our token")
                .with_peer(peer)
                .with_remedy("give both ends the same security.token_file"))
        }
        _ => Ok(()),
    }
}

/// The listener's side; an error has been told to the dialler where it speaks our protocol. With `in_clear` the dialler
/// came without the TLS that is asked for: it is told so, and refused.
pub(crate) async fn listen(
    stream: &mut Stream,
    security: &Security,
    purpose: Purpose,
    peer: &str,
    in_clear: bool,
) -> Result<()> {
    let token = security.token();
    let ours = Hello { role: Role::Listener, purpose, token: token.is_some(), nonce: nonce()? };
    let listener = ours.encode();
    let theirs = hello(stream, Role::Dialler, peer).await;
    if !matches!(&theirs, Err(e) if e.kind() == Kind::SourceLost) {
        // Also to a release that we do not speak with: it can then name ours.
        write(stream, &listener, "our hello", peer).await?;
    }
    let (dialler, theirs) = theirs?;
    let said = Transcript { dialler, listener, keying: keying(stream)? };
    let mut proof = [0; PROOF];
    read(stream, &mut proof, "the reader's proof", peer).await?;

    let refusal = match token {
        _ if in_clear => Some((IN_CLEAR, "TLS is asked for here".to_owned())),
        _ if theirs.purpose != purpose => {
            Some((OTHER_PURPOSE, format!("this is a listener of {purpose}, not of {}", theirs.purpose)))
        }
        Some(_) if !theirs.token => Some((NOT_PERMITTED, "a token is asked for here".to_owned())),
        Some(token) if !said.proves(token, Role::Dialler, proof) => {
            Some((NOT_PERMITTED, "the token is another one".to_owned()))
        }
        None if theirs.token => Some((NOT_PERMITTED, "this listener has no token to prove".to_owned())),
        _ => None,
    };
    if let Some((status, text)) = refusal {
        write(stream, &verdict(status, &text, [0; PROOF]), "our refusal", peer).await?;
        let kind = refusal_kind(status);
        return Err(Error::new(kind, "listen", format!("refused a reader: {text}")).with_peer(peer));
    }
    let proof = token.map_or([0; PROOF], |token| said.proof(token, Role::Listener));
    write(stream, &verdict(ADMITTED, "", proof), "our verdict", peer).await
}

fn refusal_kind(status: u16) -> Kind {
    match status {
        NOT_PERMITTED => Kind::Permission,
        OTHER_PURPOSE => Kind::Mismatch,
        _ => Kind::Protocol,
    }
}

fn verdict(status: u16, text: &str, proof: [u8; PROOF]) -> Vec<u8> {
    let text = text.get(..text.len().min(MAX_TEXT)).unwrap_or_default();
    let len = u16::try_from(text.len()).unwrap_or(0);
    [&status.to_le_bytes()[..], &len.to_le_bytes(), &proof, text.as_bytes()].concat()
}

fn nonce() -> Result<[u8; NONCE]> {
    let mut nonce = [0; NONCE];
    getrandom::fill(&mut nonce).map_err(|e| Error::new(Kind::Io, "getrandom", e.to_string()))?;
    Ok(nonce)
}

fn keying(stream: &Stream) -> Result<Option<[u8; tls::KEYING]>> {
    match stream {
        Stream::Plain(_) => Ok(None),
        Stream::Tls(stream) => tls::keying(stream).map(Some),
    }
}

/// The peer's hello, as bytes and as read. Another version's may have another length, so its beginning comes first.
async fn hello(stream: &mut Stream, role: Role, peer: &str) -> Result<([u8; LEN], Hello)> {
    let what = "the peer's hello";
    let refused = |e: HelloError| match e {
        HelloError::Tls => speaks_tls("hello", peer),
        HelloError::Version(_) => Error::new(Kind::Mismatch, "hello", format!("the peer is refused: {e}"))
            .with_peer(peer)
            .with_remedy("run the same release at both ends"),
        e => Error::new(Kind::Protocol, "hello", format!("the peer is refused: {e}")).with_peer(peer),
    };
    let mut bytes = [0; LEN];
    let (fixed, rest) = bytes.split_at_mut(FIXED);
    read(stream, fixed, what, peer).await?;
    if let Some(fixed) = fixed.first_chunk() {
        check_fixed(*fixed).map_err(refused)?;
    }
    read(stream, rest, what, peer).await?;
    let read = Hello::decode(&bytes, role).map_err(refused)?;
    Ok((bytes, read))
}

async fn write(stream: &mut Stream, bytes: &[u8], what: &str, peer: &str) -> Result<()> {
    let written = async {
        stream.write_all(bytes).await?;
        stream.flush().await
    };
    written.await.map_err(|e| failed("write", &e, what, peer))
}

async fn read(stream: &mut Stream, into: &mut [u8], what: &str, peer: &str) -> Result<()> {
    stream.read_exact(into).await.map(drop).map_err(|e| failed("read", &e, what, peer))
}
