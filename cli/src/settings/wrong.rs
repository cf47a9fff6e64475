//! What is wrong with a value, in the words of who wrote it: no type of ours is named.

use figment::error::{Actual, Kind};

pub(super) fn wrong(kind: &Kind) -> String {
    match kind {
        // The standard library's, which names no value.
        Kind::Message(message) if message == "invalid IP address syntax" => {
            "not an IP address such as 127.0.0.1".into()
        }
        Kind::Message(message) => message.clone(),
        Kind::InvalidType(found, wanted) | Kind::InvalidValue(found, wanted) => {
            format!("{} is not {}", shown(found), words(wanted))
        }
        Kind::UnknownVariant(found, known) => format!("`{found}` is none of {}", known.join(", ")),
        kind => kind.to_string(),
    }
}

fn shown(found: &Actual) -> String {
    match found {
        Actual::Bool(value) => format!("`{value}`"),
        Actual::Unsigned(value) => format!("`{value}`"),
        Actual::Signed(value) => format!("`{value}`"),
        Actual::Float(value) => format!("`{value}`"),
        Actual::Str(value) => format!("`{value}`"),
        Actual::Seq => "a list".into(),
        Actual::Map => "a section".into(),
        other => other.to_string(),
    }
}

/// Our own expectations are words already; those of the library are types.
fn words(wanted: &str) -> String {
    let known = match wanted {
        "u8" => "a whole number from 0 to 255",
        "u16" => "a whole number from 0 to 65535",
        "u32" | "u64" | "usize" => "a whole number from 0 on",
        "i32" | "i64" => "a whole number",
        "a boolean" | "bool" => "`true` or `false`",
        "a string" | "string" | "path string" => "a text",
        "a sequence" => "a list in brackets",
        "socket address" => "an address with a port, such as 127.0.0.1:9400",
        _ if wanted.starts_with("struct ") => "a section with keys of its own",
        _ if wanted.starts_with("enum ") => "a word",
        ours => ours,
    };
    known.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_are_told_in_words() {
        let said = wrong(&Kind::InvalidType(Actual::Str("many".into()), "u32".into()));
        assert_eq!(said, "`many` is not a whole number from 0 on");
        let said = wrong(&Kind::InvalidValue(Actual::Signed(-1), "u16".into()));
        assert_eq!(said, "`-1` is not a whole number from 0 to 65535");
        let said = wrong(&Kind::InvalidType(Actual::Unsigned(3), "struct Replicate".into()));
        assert_eq!(said, "`3` is not a section with keys of its own");
        let said = wrong(&Kind::InvalidType(Actual::Bool(true), "a size such as 256MiB".into()));
        assert_eq!(said, "`true` is not a size such as 256MiB");
        assert_eq!(wrong(&Kind::UnknownVariant("x".into(), &["auto", "base"])), "`x` is none of auto, base");
    }
}
