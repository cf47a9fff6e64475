//! What a recipe says of a name, found once for all names that differ only in their numbers.

use super::LayoutOptions;
use crate::experts::place;
use crate::recipe::{Pattern, Recipe, Rule, Split, Target};
use flashboot_core::layout::{ExpertGroup, Place};
use std::collections::HashMap;

/// Which model a tensor is part of, if any is loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Target,
    Draft,
    /// No GPU loads it.
    Unloaded,
}

/// Which pipeline stages hold a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stages {
    First,
    Last,
    FirstAndLast,
    /// The one that holds its layer.
    Layer,
    Every,
}

/// What is known of a name before its tensor is looked at.
#[derive(Debug, Clone)]
pub(crate) struct Template {
    pub(crate) kind: Kind,
    pub(crate) stages: Stages,
    /// Which rule: a number in [`Templates::rules`].
    pub(crate) rule: Result<usize, Claims>,
    /// The parameter's name; empty for one that has its module's.
    pub(crate) param: String,
    /// What a name of this template ends with after its module's.
    pub(crate) suffix: usize,
    /// The fusion it is a part of, and which part.
    pub(crate) fuse: Option<(usize, usize)>,
    /// Which component is the layer's number.
    pub(crate) layer_at: Option<usize>,
    /// Which component is the expert's, and which the number of the layer that its place goes by.
    pub(crate) expert_at: Option<usize>,
    pub(crate) place_layer_at: Option<usize>,
    /// Part of the routed experts.
    pub(crate) is_expert: bool,
    /// One tensor for every expert of its layer.
    pub(crate) stacked: bool,
}

/// How a name failed to be claimed exactly once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Claims {
    None,
    /// By the rules of these two patterns.
    Two(String, String),
}

/// Templates by name.
#[derive(Debug)]
pub(crate) struct Templates<'r> {
    recipe: &'r Recipe,
    target: Target,
    /// The recipe's rules, then the target's, then what stands for `rest` and for unclaimed tensors.
    pub(crate) rules: Vec<Rule>,
    base_rules: usize,
    target_rules: usize,
    exact: bool,
    found: HashMap<String, u32>,
    pub(crate) all: Vec<Template>,
    key: String,
    /// Of each template its key, and which one came after it the last time: names follow each other alike.
    keys: Vec<(String, u32)>,
    last: u32,
}

impl<'r> Templates<'r> {
    pub(crate) fn new(recipe: &'r Recipe, options: &LayoutOptions) -> Self {
        let of_target = recipe.target(options.target);
        let target_rules = of_target.map(|t| t.rules.as_slice()).unwrap_or_default();
        let mut rules = recipe.rules.clone();
        rules.extend(target_rules.iter().cloned());
        let whole = |split| Rule {
            patterns: Vec::new(),
            split,
            heads: None,
            kv_heads: None,
            order: Default::default(),
            parts: 1,
            transposed: false,
        };
        // What unclaimed tensors are where that is allowed, then the two kinds of rest.
        rules.push(whole(Split::Replicated));
        rules.push(whole(recipe.rest.unwrap_or(Split::Replicated)));
        rules.push(whole(of_target.and_then(|t| t.rest).unwrap_or(Split::Replicated)));
        let fuses = of_target.map(|t| t.fuse.as_slice()).unwrap_or_default();
        let patterns = rules.iter().flat_map(|r| &r.patterns).chain(&recipe.first).chain(&recipe.last);
        let needs = &recipe.needs;
        let patterns = patterns.chain(&needs.every).chain(&needs.experts).chain(&needs.dense);
        let patterns = patterns.chain(&recipe.draft).chain(&recipe.unloaded).chain(recipe.layers.iter());
        let exact = patterns.chain(fuses.iter().flat_map(|f| &f.parts)).any(Pattern::has_number);
        Self {
            recipe,
            target: options.target,
            base_rules: recipe.rules.len(),
            target_rules: target_rules.len(),
            rules,
            exact,
            found: HashMap::new(),
            all: Vec::new(),
            key: String::new(),
            keys: Vec::new(),
            last: 0,
        }
    }

    /// The rule for tensors that no rule is about.
    pub(crate) fn unclaimed(&self) -> usize {
        self.base_rules + self.target_rules
    }

    /// The template of a name. Its numbers are put into `numbers`, each with the component it is.
    pub(crate) fn of(&mut self, name: &str, numbers: &mut Vec<(usize, u32)>) -> u32 {
        numbers.clear();
        self.key.clear();
        for (at, component) in name.split('.').enumerate() {
            if crate::recipe::is_number(component) {
                // One that is past 32 bits is no layer and no expert.
                numbers.extend(component.parse().ok().map(|n| (at, n)));
                self.key.push_str(if self.exact { component } else { "#" });
            } else {
                self.key.push_str(component);
            }
            self.key.push('.');
        }
        let guess = self.keys.get(self.last as usize).map_or(0, |(_, next)| *next);
        let guessed = self.keys.get(guess as usize).is_some_and(|(key, _)| *key == self.key);
        let number = if guessed { guess } else { self.look_up(name) };
        if let Some((_, next)) = self.keys.get_mut(self.last as usize) {
            *next = number;
        }
        self.last = number;
        number
    }

    /// The number of the template that has the key at hand, made if it is the first one.
    fn look_up(&mut self, name: &str) -> u32 {
        if let Some(&number) = self.found.get(&self.key) {
            return number;
        }
        let components: Vec<_> = name.split('.').collect();
        let number = u32::try_from(self.all.len()).unwrap_or(u32::MAX);
        let template = self.make(name, &components);
        self.all.push(template);
        self.found.insert(self.key.clone(), number);
        self.keys.push((self.key.clone(), number));
        number
    }

    fn make(&self, name: &str, components: &[&str]) -> Template {
        let recipe = self.recipe;
        let is =
            |patterns: &[Pattern]| patterns.iter().any(|p| p.matches(components) || in_module(p, components));
        let layer_at =
            recipe.layers.as_ref().filter(|l| l.prefix_len(components).is_some()).and_then(Pattern::star);
        let kind = if is(&recipe.unloaded) {
            Kind::Unloaded
        } else if is(&recipe.draft) {
            Kind::Draft
        } else {
            Kind::Target
        };
        let stages = match (layer_at, is(&recipe.first), is(&recipe.last)) {
            (Some(_), ..) => Stages::Layer,
            (None, true, true) => Stages::FirstAndLast,
            (None, true, false) => Stages::First,
            (None, false, true) => Stages::Last,
            (None, false, false) => Stages::Every,
        };
        let (rule, how) = self.claim(components);
        let (param, suffix) = how.split(name);
        let place = place(name);
        let fuse = recipe.target(self.target).and_then(|rules| {
            rules.fuse.iter().enumerate().find_map(|(i, fuse)| {
                let part = fuse.parts.iter().position(|p| claims(p, components).is_some())?;
                Some((i, part))
            })
        });
        let stage = matches!(place, Place::Expert { group: ExpertGroup::Stage, .. });
        let experts_at =
            components.iter().position(|c| *c == "experts").filter(|_| place != Place::NonExpert);
        let is_number = |c: &&str| crate::recipe::is_number(c);
        let first_number = components.iter().take(experts_at.unwrap_or(0)).position(is_number);
        Template {
            kind: if kind == Kind::Target && stage && !recipe.draft.is_empty() { Kind::Draft } else { kind },
            stages,
            rule,
            param,
            suffix,
            fuse,
            layer_at,
            expert_at: match place {
                Place::Expert { expert: Some(_), .. } => experts_at.map(|at| at + 1),
                _ => None,
            },
            place_layer_at: first_number,
            is_expert: place != Place::NonExpert,
            stacked: matches!(place, Place::Expert { expert: None, .. }),
        }
    }

    /// The rule that claims a name, and how its pattern met it.
    fn claim(&self, components: &[&str]) -> (Result<usize, Claims>, How) {
        let own = self.base_rules..self.base_rules + self.target_rules;
        let base = self.first_two(0..self.base_rules, components);
        let overriding = self.first_two(own, components);
        let rest = |offset: usize| (Ok(self.unclaimed() + offset), How::Module);
        match (overriding, base) {
            ((Some(a), Some(b)), _) | ((None, _), (Some(a), Some(b))) => {
                (Err(Claims::Two(a.2, b.2)), How::Module)
            }
            ((Some((rule, how, _)), None), _) => (Ok(rule), how),
            _ if self.recipe.target(self.target).is_some_and(|t| t.rest.is_some()) => rest(2),
            ((None, _), (Some((rule, how, _)), None)) => (Ok(rule), how),
            _ if self.recipe.rest.is_some() => rest(1),
            _ => (Err(Claims::None), How::Module),
        }
    }

    /// The first two rules of a range that claim a name: number, how, and the pattern.
    fn first_two(
        &self,
        range: std::ops::Range<usize>,
        components: &[&str],
    ) -> (Option<Claim>, Option<Claim>) {
        let rules = self.rules.iter().enumerate().take(range.end).skip(range.start);
        let mut found = rules.filter_map(|(number, rule)| {
            rule.patterns.iter().find_map(|p| Some((number, claims(p, components)?, p.text().to_owned())))
        });
        (found.next(), found.next())
    }
}

type Claim = (usize, How, String);

/// How a pattern meets a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum How {
    /// It is the module, and the last component the parameter.
    Module,
    /// It is the whole name.
    Whole,
    /// It is the whole name without an ending such as `_scales`.
    Ending(&'static str),
}

const ENDINGS: [&str; 3] = ["_bias", "_blocks", "_scales"];

impl How {
    /// The parameter's name, and how many bytes of the tensor's come after the module's.
    fn split(self, name: &str) -> (String, usize) {
        match self {
            Self::Module => {
                let param = name.rsplit_once('.').map_or(name, |(_, param)| param);
                (param.to_owned(), param.len().saturating_add(1))
            }
            Self::Whole => (String::new(), 0),
            Self::Ending(ending) => (ending.trim_start_matches('_').to_owned(), ending.len()),
        }
    }
}

/// How `pattern` claims the name of these components, if it does.
pub(crate) fn claims(pattern: &Pattern, components: &[&str]) -> Option<How> {
    if in_module(pattern, components) {
        return Some(How::Module);
    }
    if pattern.matches(components) {
        return Some(How::Whole);
    }
    let (last, front) = components.split_last()?;
    ENDINGS.into_iter().find_map(|ending| {
        let mut short = front.to_vec();
        short.push(last.strip_suffix(ending)?);
        pattern.matches(&short).then_some(How::Ending(ending))
    })
}

fn in_module(pattern: &Pattern, components: &[&str]) -> bool {
    components.split_last().is_some_and(|(_, module)| !module.is_empty() && pattern.matches(module))
}
