//! What an error is to whoever must act on it: its kind, the call, the sentence and the remedy; and the boundary's error
//! that is made of these.

use super::Error;
use crate::cause::IoCause;
use flashboot_core::{Code, Kind};

impl Error {
    /// What was being done, as the boundary's error names it: the call, or the step.
    pub fn op(&self) -> &'static str {
        match self {
            Self::Io { op, .. } | Self::NotPermitted { op, .. } => op,
            Self::Missing { .. }
            | Self::IsDirectory { .. }
            | Self::NotRegular { .. }
            | Self::NoSafetensors { .. }
            | Self::SeveralIndices { .. }
            | Self::IsImage { .. }
            | Self::NotAnImage { .. }
            | Self::NoMetadata { .. } => "open",
            Self::NoSpace { .. } => "write",
            Self::Exists { .. } => "create",
            Self::NotReplaceable { .. } => "replace",
            Self::Changed { .. } => "read",
            Self::IndexPath { .. }
            | Self::MissingShard { .. }
            | Self::StaleIndex { .. }
            | Self::ShardNotInIndex { .. } => "index",
            Self::TrailingOverCap { .. } | Self::Layout(_) => "pack",
            Self::ImageVersion { .. }
            | Self::ImageId { .. }
            | Self::ImageSize { .. }
            | Self::ImageHash { .. }
            | Self::BadBlock { .. } => "verify",
            Self::NotUnpackable { .. } => "unpack",
            Self::Refused(_) => "plan",
            Self::Cancelled { .. } => "stop",
            Self::Memory(e) => e.op(),
            _ => "parse",
        }
    }

    /// What a person can do about it, where the error has it; the end of its text.
    pub fn remedy(&self) -> Option<String> {
        self.parts().1
    }

    /// The sentence without what the boundary's error has in fields of its own, and the remedy.
    fn parts(&self) -> (String, Option<String>) {
        let text = self.to_string();
        match self {
            Self::Memory(e) => (e.detail().to_owned(), e.remedy().map(str::to_owned)),
            Self::Io { path, cause, .. } => {
                let said = if cause.errno.is_some() { String::new() } else { format!(": {cause}") };
                (format!("{}{said}", path.display()), cause.remedy().map(str::to_owned))
            }
            // Texts without a remedy, in which only a name could hold a semicolon.
            Self::Field { .. }
            | Self::Shape { .. }
            | Self::ShapeBytes { .. }
            | Self::Reversed { .. }
            | Self::Hole { .. }
            | Self::Overlap { .. }
            | Self::Layout(_)
            | Self::Recipe(_)
            | Self::NotAnImage { .. }
            | Self::NotUnpackable { .. }
            | Self::Cancelled { .. } => (text, None),
            // Every other text ends with one, and no remedy holds a semicolon.
            _ => match text.rsplit_once("; ") {
                Some((sentence, remedy)) => (sentence.to_owned(), Some(remedy.to_owned())),
                None => (text, None),
            },
        }
    }

    /// The kind, for code that decides what to do next: refused input is [`Kind::Corrupt`] or
    /// [`Kind::Mismatch`], a failing disk [`Kind::Io`], a full one [`Kind::Exhausted`].
    pub fn kind(&self) -> Kind {
        match self {
            Self::Missing { .. } => Kind::Unavailable,
            Self::NotPermitted { .. } => Kind::Permission,
            Self::NoSpace { .. } => Kind::Exhausted,
            Self::Memory(e) => e.kind(),
            Self::Io { cause, .. } => match cause.errno {
                Some(12 | 23 | 24 | 27 | 28 | 122) => Kind::Exhausted,
                _ => Kind::Io,
            },
            Self::Exists { .. }
            | Self::NotReplaceable { .. }
            | Self::SeveralIndices { .. }
            | Self::IsImage { .. } => Kind::Invalid,
            Self::Layout(_) | Self::NotUnpackable { .. } | Self::Recipe(_) => Kind::Invalid,
            Self::Refused(_) => Kind::Mismatch,
            Self::ImageVersion { .. } | Self::ShardNotInIndex { .. } => Kind::Mismatch,
            Self::Cancelled { .. } => Kind::Cancelled,
            _ => Kind::Corrupt,
        }
    }
}

impl From<Error> for flashboot_core::Error {
    fn from(e: Error) -> Self {
        // Its code and whatever else it has go along.
        if let Error::Memory(e) = e {
            return e;
        }
        let (detail, remedy) = e.parts();
        let made = Self::new(e.kind(), e.op(), detail);
        let made = match &e {
            Error::Io { cause: IoCause { errno: Some(errno), .. }, .. } => {
                made.with_code(Code::Errno(*errno))
            }
            _ => made,
        };
        match remedy {
            Some(remedy) => made.with_remedy(remedy),
            None => made,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{io, path::Path};

    fn io(errno: i32) -> Error {
        Error::io("open", Path::new("a; b"), &io::Error::from_raw_os_error(errno))
    }

    #[test]
    fn the_boundarys_error_says_each_thing_once() {
        let e = flashboot_core::Error::from(io(40));
        assert_eq!((e.op(), e.detail(), e.remedy()), ("open", "a; b", None));
        assert_eq!(e.to_string(), format!("open: a; b: {}", io::Error::from_raw_os_error(40)));
        let e = flashboot_core::Error::from(io(24));
        assert_eq!((e.kind(), e.detail()), (Kind::Exhausted, "a; b"));
        assert!(e.remedy().is_some_and(|r| r.contains("ulimit -n")), "{e}");
        assert!(io(24).to_string().ends_with("(ulimit -n)"), "{}", io(24));
    }

    #[test]
    fn memory_that_cannot_be_mapped_keeps_its_size_code_and_remedy() {
        let made = flashboot_core::Error::from_errno("mmap", 12, "4194304 bytes").with_remedy("ask for less");
        let e = Error::Memory(made.clone());
        assert_eq!((e.kind(), e.op(), e.remedy()), (made.kind(), "mmap", Some("ask for less".into())));
        assert_eq!(e.to_string(), made.to_string());
        assert_eq!(flashboot_core::Error::from(e), made);
    }

    #[test]
    fn a_remedy_is_split_from_its_sentence() {
        let e = flashboot_core::Error::from(Error::HeaderOverCap { file: "a; b".into(), size: 9, cap: 8 });
        assert_eq!(e.op(), "parse");
        assert_eq!(e.detail(), "a; b: the header is 9 bytes, above the cap of 8");
        assert_eq!(e.remedy(), Some("if the file is sound, raise the header cap"));
        let hole = Error::Hole { file: "a; b".into(), tensor: "t".into(), begin: 2, needed: 1 };
        assert_eq!(hole.remedy(), None);
    }
}
