//! Patterns of tensor names: `model.layers.*.mlp.{gate,up}_proj`.
//!
//! Names are compared component by component (components are what dots separate). `*` is exactly one component,
//! `**` any number of them, `{a,b}` one of the texts between the braces. Nothing else is special.

/// At most this many texts may one pattern's braces stand for.
const ALTERNATIVES: usize = 64;

/// A pattern, its braces written out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Pattern {
    text: String,
    plain: Vec<Vec<Component>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Component {
    Text(String),
    One,
    Any,
}

impl Pattern {
    /// Reads a pattern; says what is wrong with one that is none.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let mut plain = Vec::new();
        for variant in alternatives(text)? {
            plain.push(variant.split('.').map(|c| component(c, text)).collect::<Result<_, _>>()?);
        }
        Ok(Self { text: text.into(), plain })
    }

    /// As it was written.
    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    /// Whether it means the name of these components.
    pub(crate) fn matches(&self, name: &[&str]) -> bool {
        self.plain.iter().any(|pattern| fits(pattern, name))
    }

    /// Whether it means the beginning of the name of these components; if so how many of them.
    pub(crate) fn prefix_len(&self, name: &[&str]) -> Option<usize> {
        let len = self.plain.first()?.len();
        name.get(..len).is_some_and(|front| self.matches(front)).then_some(len)
    }

    /// The components that its stars stand for in `name`, if it means `name`.
    pub(crate) fn stars<'n>(&self, name: &[&'n str]) -> Option<Vec<&'n str>> {
        let pattern = self.plain.iter().find(|pattern| fits(pattern, name))?;
        let stars = pattern.iter().zip(name).filter(|(c, _)| matches!(c, Component::One));
        Some(stars.map(|(_, text)| *text).collect())
    }

    /// Each of the texts that its braces stand for, as a pattern.
    pub(crate) fn spelled_out(&self) -> impl Iterator<Item = Self> + '_ {
        self.plain.iter().map(|plain| {
            let text: Vec<_> = plain.iter().map(Component::text).collect();
            Self { text: text.join("."), plain: vec![plain.clone()] }
        })
    }

    /// Its text with `number` for the first star.
    pub(crate) fn numbered(&self, number: u64) -> String {
        self.text.replacen('*', &number.to_string(), 1)
    }

    /// Where its first star stands.
    pub(crate) fn star(&self) -> Option<usize> {
        self.plain.first()?.iter().position(|c| matches!(c, Component::One))
    }

    /// Whether it has a `**`, so that its length is not that of the names it means.
    pub(crate) fn is_open(&self) -> bool {
        self.plain.iter().flatten().any(|c| matches!(c, Component::Any))
    }

    /// Whether it names a component that is a number: then names that differ only in numbers are not alike to it.
    pub(crate) fn has_number(&self) -> bool {
        let number = |c: &Component| matches!(c, Component::Text(t) if super::is_number(t));
        self.plain.iter().flatten().any(number)
    }
}

impl Component {
    fn text(&self) -> &str {
        match self {
            Self::Text(text) => text,
            Self::One => "*",
            Self::Any => "**",
        }
    }
}

fn component(text: &str, whole: &str) -> Result<Component, String> {
    match text {
        "*" => Ok(Component::One),
        "**" => Ok(Component::Any),
        "" => Err(format!("`{whole}` has an empty component")),
        text if text.contains('*') => {
            Err(format!("`{whole}`: `*` stands for a whole component, `{text}` has more in it"))
        }
        text => Ok(Component::Text(text.into())),
    }
}

/// The texts that `text` stands for once its braces are written out; braces do not nest.
fn alternatives(text: &str) -> Result<Vec<String>, String> {
    let mut done = vec![String::new()];
    let mut rest = text;
    while let Some((front, after)) = rest.split_once('{') {
        let (inside, after) =
            after.split_once('}').ok_or_else(|| format!("`{text}`: a brace is not closed"))?;
        if front.contains('}') || inside.contains('{') {
            return Err(format!("`{text}`: braces do not nest"));
        }
        let choices: Vec<&str> = inside.split(',').collect();
        if done.len().saturating_mul(choices.len()) > ALTERNATIVES {
            return Err(format!("`{text}` stands for more than {ALTERNATIVES} texts"));
        }
        done = done.iter().flat_map(|d| choices.iter().map(move |c| format!("{d}{front}{c}"))).collect();
        rest = after;
    }
    if rest.contains('}') {
        return Err(format!("`{text}`: a brace was not opened"));
    }
    done.iter_mut().for_each(|d| d.push_str(rest));
    Ok(done)
}

fn fits(pattern: &[Component], name: &[&str]) -> bool {
    // The last `**` seen and how much of the name it has taken: it is the only one worth trying again.
    let (mut p, mut n, mut again) = (0, 0, None);
    loop {
        match (pattern.get(p), name.get(n)) {
            (None, None) => return true,
            (Some(Component::Any), _) => {
                again = Some((p, n));
                p += 1;
                continue;
            }
            (Some(Component::One), Some(_)) => {
                (p, n) = (p + 1, n + 1);
                continue;
            }
            (Some(Component::Text(text)), Some(there)) if text == there => {
                (p, n) = (p + 1, n + 1);
                continue;
            }
            _ => {}
        }
        match again {
            Some((star, taken)) if taken < name.len() => {
                again = Some((star, taken + 1));
                (p, n) = (star + 1, taken + 1);
            }
            _ => return false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matches(pattern: &str, name: &str) -> bool {
        let name: Vec<_> = name.split('.').collect();
        Pattern::parse(pattern).unwrap().matches(&name)
    }

    #[test]
    fn a_star_is_one_component_and_two_are_any_number() {
        assert!(matches("a.*.c", "a.17.c"));
        assert!(!matches("a.*.c", "a.c") && !matches("a.*.c", "a.1.2.c") && !matches("a.*.c", "a.1.cc"));
        assert!(matches("**.c", "c") && matches("**.c", "a.b.c") && !matches("**.c", "a.c.d"));
        assert!(matches("a.**", "a") && matches("a.**.b.**.c", "a.x.b.b.c"));
        assert!(matches("x.{gate,up}_proj", "x.up_proj") && !matches("x.{gate,up}_proj", "x.down_proj"));
        assert!(matches("{a,b}.{c,d}", "b.c"));
    }

    #[test]
    fn stars_say_what_they_stood_for() {
        let pattern = Pattern::parse("layers.*.experts.*.w1").unwrap();
        let name = ["layers", "3", "experts", "17", "w1"];
        assert_eq!(pattern.stars(&name), Some(vec!["3", "17"]));
        assert_eq!(pattern.star(), Some(1));
        assert_eq!(Pattern::parse("layers.*").unwrap().prefix_len(&name), Some(2));
        let each: Vec<_> = Pattern::parse("layers.*.{w1,w2}.**").unwrap().spelled_out().collect();
        assert_eq!(each.iter().map(Pattern::text).collect::<Vec<_>>(), ["layers.*.w1.**", "layers.*.w2.**"]);
        assert_eq!(each[0].numbered(7), "layers.7.w1.**");
    }

    #[test]
    fn what_is_no_pattern_is_said() {
        for bad in ["", "a..b", "a.b*", "{a", "a}", "{a,{b}}", "***"] {
            assert!(Pattern::parse(bad).is_err(), "{bad}");
        }
        let many = "{a,b,c}".repeat(4);
        assert!(Pattern::parse(&many).unwrap_err().contains("more than 64"));
    }
}
