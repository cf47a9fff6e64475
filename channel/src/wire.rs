//! An error as JSON: what the faces print and what workers send to their parent.

use flashboot_core::{Code, Error, Kind};
use serde::{Deserialize, Serialize};

/// An [`Error`], field by field.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorWire {
    /// The kind's name, in lower case with hyphens (`source-lost`).
    pub kind: String,
    /// The call that failed.
    pub op: String,
    /// The sentence with the numbers.
    pub detail: String,
    /// The peer, where one is involved.
    pub peer: Option<String>,
    /// The chunk, where one is involved.
    pub chunk: Option<u64>,
    /// The lower layer's number.
    pub code: Option<i64>,
    /// That number in words, as the lower layer has them (`Cannot allocate memory (os error 12)`).
    #[serde(default)]
    pub code_text: Option<String>,
    /// What to do next.
    pub remedy: Option<String>,
    /// All of it as one sentence.
    pub message: String,
}

const KINDS: [Kind; 15] = [
    Kind::Invalid,
    Kind::Unavailable,
    Kind::Mismatch,
    Kind::Corrupt,
    Kind::StaleGeneration,
    Kind::SourceLost,
    Kind::Stalled,
    Kind::Deadline,
    Kind::Cancelled,
    Kind::Busy,
    Kind::Permission,
    Kind::Exhausted,
    Kind::Io,
    Kind::Protocol,
    Kind::ContextLost,
];

/// The kind's name, in lower case with hyphens.
pub fn kind_name(kind: Kind) -> String {
    let mut name = String::new();
    for c in format!("{kind:?}").chars() {
        if c.is_ascii_uppercase() && !name.is_empty() {
            name.push('-');
        }
        name.push(c.to_ascii_lowercase());
    }
    name
}

impl From<&Error> for ErrorWire {
    fn from(e: &Error) -> Self {
        let code = e.code().map(|code| match code {
            Code::Errno(n) => i64::from(n),
            Code::Cuda(n) | Code::Verbs(n) => i64::from(n),
            _ => -1,
        });
        Self {
            kind: kind_name(e.kind()),
            op: e.op().to_owned(),
            detail: e.detail().to_owned(),
            peer: e.peer().map(str::to_owned),
            chunk: e.chunk(),
            code,
            code_text: e.code().map(|code| code.to_string()),
            remedy: e.remedy().map(str::to_owned),
            message: e.to_string(),
        }
    }
}

impl ErrorWire {
    /// The error again, as one of `who`'s, a process that this one started for `op`: its call becomes part of the sentence,
    /// since the boundary's error names calls of this process; and so do the words of its code, whose number is of that call.
    /// That process is not the caller's to start again.
    pub fn into_error(self, op: &'static str, who: &str) -> Error {
        let kind = KINDS.into_iter().find(|kind| kind_name(*kind) == self.kind).unwrap_or(Kind::Protocol);
        let Self { op: call, detail, peer, chunk, code_text, remedy, .. } = self;
        let code = code_text.map_or_else(String::new, |text| format!(": {text}"));
        let mut error = Error::new(kind, op, format!("{who}: {call}: {detail}{code}"));
        if let Some(peer) = peer {
            error = error.with_peer(peer);
        }
        if let Some(chunk) = chunk {
            error = error.with_chunk(chunk);
        }
        match remedy {
            Some(_) if kind == Kind::ContextLost => error.with_remedy(format!(
                "see what dmesg (the Xid) and nvidia-smi say of that GPU, then run {op} again: the GPU context of this rank's \
                 process is beyond use"
            )),
            Some(remedy) => error.with_remedy(remedy),
            None => error,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_crosses_with_its_kind_place_and_remedy() {
        let e = Error::new(Kind::StaleGeneration, "observe", "it holds nothing")
            .with_peer("#3")
            .with_chunk(7)
            .with_remedy("ask again");
        let wire = ErrorWire::from(&e);
        assert_eq!(wire.kind, "stale-generation");
        let json = serde_json::to_string(&wire).unwrap();
        let back = serde_json::from_str::<ErrorWire>(&json).unwrap().into_error("replicate", "clone 2");
        assert_eq!((back.kind(), back.peer(), back.chunk()), (e.kind(), Some("#3"), Some(7)));
        assert_eq!(
            back.to_string(),
            "replicate: clone 2: observe: it holds nothing (peer #3, chunk 7); ask again"
        );
    }

    #[test]
    fn the_lower_layers_words_cross_too() {
        let e = Error::from_errno("mmap", 12, "mapping a memfd");
        let back = ErrorWire::from(&e).into_error("bench", "clone 1");
        assert_eq!(
            back.to_string(),
            "bench: clone 1: mmap: mapping a memfd: Cannot allocate memory (os error 12)"
        );
    }

    #[test]
    fn what_a_worker_cannot_do_is_not_asked_of_its_user() {
        let e = Error::new(Kind::ContextLost, "cuEventQuery", "CUDA_ERROR_LAUNCH_FAILED")
            .with_remedy("restart this process and let it join again");
        let back = ErrorWire::from(&e).into_error("replicate", "clone 1");
        assert_eq!(back.kind(), Kind::ContextLost);
        let remedy = back.remedy().unwrap();
        assert!(remedy.contains("run replicate again") && !remedy.contains("this process"), "{remedy}");
    }

    #[test]
    fn every_kind_has_a_name_of_its_own() {
        let names: std::collections::BTreeSet<_> = KINDS.into_iter().map(kind_name).collect();
        assert_eq!(names.len(), KINDS.len());
    }
}
