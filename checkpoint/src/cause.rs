//! The parts that errors are made of: a failed call, a list of names, a field's problem. All comparable.

use std::{fmt, io};

/// A failed system call, kept comparable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IoCause {
    /// What kind of failure.
    pub kind: io::ErrorKind,
    /// `errno`, where the system gave one.
    pub errno: Option<i32>,
    /// The system's own sentence.
    pub text: String,
}

impl IoCause {
    /// What helps against a limit that was reached.
    pub fn remedy(&self) -> Option<&'static str> {
        // Linux numbers, the same on x86_64 and aarch64.
        Some(match self.errno? {
            11 => "raise the limit on threads (ulimit -u)",
            12 => "free memory, or raise the limit on it (ulimit -v, the container's)",
            23 => "close programs that hold files open",
            24 => "raise the limit on open files (ulimit -n)",
            27 => "raise the limit on file sizes (ulimit -f), or choose a file system that has larger files",
            28 => "free space or inodes (df, df -i), or choose another place",
            122 => "free space within your quota, or choose another place",
            _ => return None,
        })
    }
}

impl From<&io::Error> for IoCause {
    fn from(e: &io::Error) -> Self {
        Self { kind: e.kind(), errno: e.raw_os_error(), text: e.to_string() }
    }
}

impl fmt::Display for IoCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Up to a few names, and how many there are.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Names {
    /// The first of them.
    pub first: Vec<String>,
    /// How many there are in all.
    pub count: u64,
}

impl Names {
    const SHOWN: usize = 8;

    pub(crate) fn push(&mut self, name: impl Into<String>) {
        if self.first.len() < Self::SHOWN {
            self.first.push(name.into());
        }
        self.count = self.count.saturating_add(1);
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }
}

impl fmt::Display for Names {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, name) in self.first.iter().enumerate() {
            write!(f, "{}`{name}`", if i == 0 { "" } else { ", " })?;
        }
        let more = self.count.saturating_sub(self.first.len() as u64);
        if more > 0 { write!(f, " and {more} more") } else { Ok(()) }
    }
}

/// What is wrong with one field of a header, an index or a table.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FieldProblem {
    /// Not there.
    #[error("is missing")]
    Missing,
    /// There twice.
    #[error("is given twice")]
    Twice,
    /// A number below zero.
    #[error("holds {0}, which is negative")]
    Negative(i64),
    /// Another type or form than the format has there.
    #[error("holds {found}, where the format has {needed}")]
    Form {
        /// What is there.
        found: String,
        /// What belongs there.
        needed: &'static str,
    },
    /// A value that contradicts another.
    #[error("is {found}, needed {needed}")]
    Value {
        /// What is there.
        found: String,
        /// What belongs there.
        needed: String,
    },
}
