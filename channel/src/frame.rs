//! Length-prefixed frames: four bytes of length, little-endian, then that many bytes.
//!
//! A length is compared with the caller's cap before a byte is allocated for it.

use std::io::{self, Read, Write};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

/// Bytes of the length.
pub const PREFIX: usize = 4;

/// Why a frame cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// Longer than the caller takes.
    #[error("a frame of {len} bytes; at most {cap} are taken here")]
    TooLong {
        /// What the prefix says, or what was to be sent.
        len: u64,
        /// The caller's cap.
        cap: usize,
    },
    /// The connection ended inside a frame.
    #[error("the connection ended within a frame")]
    Cut,
    /// The connection's own error.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// The length that `prefix` says, if it is at most `cap`.
pub fn length(prefix: [u8; PREFIX], cap: usize) -> Result<usize, FrameError> {
    let len = u32::from_le_bytes(prefix);
    match usize::try_from(len) {
        Ok(fits) if fits <= cap => Ok(fits),
        _ => Err(FrameError::TooLong { len: len.into(), cap }),
    }
}

fn prefix(body: &[u8], cap: usize) -> Result<[u8; PREFIX], FrameError> {
    match u32::try_from(body.len()) {
        Ok(len) if body.len() <= cap => Ok(len.to_le_bytes()),
        _ => Err(FrameError::TooLong { len: body.len() as u64, cap }),
    }
}

/// The prefix and the body in one buffer, so that they leave in one segment.
pub fn framed(body: &[u8], cap: usize) -> Result<Vec<u8>, FrameError> {
    Ok([&prefix(body, cap)?[..], body].concat())
}

fn cut(error: io::Error) -> FrameError {
    if error.kind() == io::ErrorKind::UnexpectedEof { FrameError::Cut } else { FrameError::Io(error) }
}

/// The next frame; `None` where the connection ended before one began.
pub fn read(from: &mut impl Read, cap: usize) -> Result<Option<Vec<u8>>, FrameError> {
    let mut prefix = [0; PREFIX];
    let (first, rest) = prefix.split_at_mut(1);
    loop {
        match from.read(first) {
            Ok(0) => return Ok(None),
            Ok(_) => break,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e.into()),
        }
    }
    from.read_exact(rest).map_err(cut)?;
    let mut body = vec![0; length(prefix, cap)?];
    from.read_exact(&mut body).map_err(cut)?;
    Ok(Some(body))
}

/// Sends one frame.
pub fn write(to: &mut impl Write, body: &[u8], cap: usize) -> Result<(), FrameError> {
    to.write_all(&framed(body, cap)?)?;
    Ok(to.flush()?)
}

/// As [`read`]. Dropping the future loses what was read of a frame: the channel is of no use after it.
pub async fn receive(from: &mut (impl AsyncRead + Unpin), cap: usize) -> Result<Option<Vec<u8>>, FrameError> {
    let mut prefix = [0; PREFIX];
    let (first, rest) = prefix.split_at_mut(1);
    if from.read(first).await? == 0 {
        return Ok(None);
    }
    from.read_exact(rest).await.map_err(cut)?;
    let mut body = vec![0; length(prefix, cap)?];
    from.read_exact(&mut body).await.map_err(cut)?;
    Ok(Some(body))
}

/// As [`write`](fn@write). Dropping the future may leave half a frame sent.
pub async fn send(to: &mut (impl AsyncWrite + Unpin), body: &[u8], cap: usize) -> Result<(), FrameError> {
    to.write_all(&framed(body, cap)?).await?;
    Ok(to.flush().await?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn frames_read_back_in_order(bodies in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..50), 0..5)) {
            let mut wire = Vec::new();
            for body in &bodies {
                write(&mut wire, body, 50).unwrap();
            }
            let mut from = &wire[..];
            for body in &bodies {
                let read = read(&mut from, 50).unwrap();
                prop_assert_eq!(read.as_ref(), Some(body));
            }
            prop_assert_eq!(read(&mut from, 50).unwrap(), None);
        }

        #[test]
        fn any_bytes_end_in_frames_an_end_or_an_error(wire in prop::collection::vec(any::<u8>(), 0..200), cap in 0usize..100) {
            let mut from = &wire[..];
            while let Ok(Some(body)) = read(&mut from, cap) {
                prop_assert!(body.len() <= cap);
            }
        }
    }

    #[test]
    fn a_cut_frame_and_a_long_one_are_told_apart() {
        let wire = framed(b"hello", 5).unwrap();
        for len in 1..wire.len() {
            assert!(matches!(read(&mut &wire[..len], 5), Err(FrameError::Cut)), "{len}");
        }
        assert!(matches!(read(&mut &wire[..], 4), Err(FrameError::TooLong { len: 5, cap: 4 })));
        assert!(matches!(framed(b"hello", 4), Err(FrameError::TooLong { len: 5, cap: 4 })));
        assert!(matches!(read(&mut &u32::MAX.to_le_bytes()[..], 1 << 20), Err(FrameError::TooLong { .. })));
    }
}
