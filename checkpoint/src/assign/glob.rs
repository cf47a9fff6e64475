//! Globs of `--exclude`: `*` is any run of characters, `?` one of them.

/// Whether `glob` means all of `name`.
pub(crate) fn matches(glob: &str, name: &str) -> bool {
    let (glob, name) = (glob.as_bytes(), name.as_bytes());
    let (mut g, mut n, mut again) = (0, 0, None);
    loop {
        match (glob.get(g), name.get(n)) {
            (None, None) => return true,
            (Some(b'*'), _) => {
                again = Some((g, n));
                g += 1;
                continue;
            }
            (Some(b'?'), Some(_)) => {
                (g, n) = (g + 1, n + 1);
                continue;
            }
            (Some(c), Some(there)) if c == there => {
                (g, n) = (g + 1, n + 1);
                continue;
            }
            _ => {}
        }
        match again {
            Some((star, taken)) if taken < name.len() => {
                again = Some((star, taken + 1));
                (g, n) = (star + 1, taken + 1);
            }
            _ => return false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::matches;

    #[test]
    fn stars_and_question_marks() {
        assert!(matches("*.experts.*", "a.experts.1.w") && matches("a?c", "abc") && matches("*", ""));
        assert!(!matches("*.experts", "a.experts.1") && !matches("a?c", "ac") && !matches("", "a"));
        assert!(matches("a*b*c", "aXbbYc") && !matches("a*b*c", "aXbbY"));
    }
}
