//! The tensors of all ranks' images together, in payload order: one of the checkpoint each, or several fused.

use super::{Assignment, Kind};
use crate::experts::place;
use crate::parallel::Refused;
use flashboot_core::layout::{Place, natural_order};
use std::collections::HashMap;

/// One tensor of an image, on whichever ranks hold a part of it.
#[derive(Debug)]
pub(crate) struct Group {
    pub(crate) place: Place,
    pub(crate) is: GroupKind,
}

impl Group {
    /// The checkpoint's tensor that it is, if it is one.
    pub(crate) fn one(&self) -> Option<u32> {
        match self.is {
            GroupKind::One(tensor) => Some(tensor),
            GroupKind::Fused(_) => None,
        }
    }
}

#[derive(Debug)]
pub(crate) enum GroupKind {
    /// A tensor of the checkpoint, by number.
    One(u32),
    /// Several under a new name.
    Fused(Box<Fused>),
}

#[derive(Debug)]
pub(crate) struct Fused {
    pub(crate) name: String,
    pub(crate) parts: u32,
    /// Experts are stacked along a new first dimension.
    pub(crate) stacked: bool,
    /// By expert, then by part.
    pub(crate) members: Vec<Member>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Member {
    pub(crate) expert: u32,
    pub(crate) part: u32,
    pub(crate) tensor: u32,
}

/// Every group, in payload order.
#[derive(Debug)]
pub(crate) struct Groups(pub(crate) Vec<Group>);

impl Groups {
    /// Those of everything that a GPU loads.
    pub(crate) fn new(assignment: &Assignment<'_>) -> Result<Self, Refused> {
        let tensors = assignment.model.tensors;
        let rules = assignment.recipe.target(assignment.options.target);
        let fuses = rules.map(|r| r.fuse.as_slice()).unwrap_or_default();
        let mut groups = Vec::with_capacity(assignment.entries.len());
        let mut fused = HashMap::<String, Fused>::new();
        for (number, entry) in assignment.entries.iter().enumerate() {
            let (Some(tensor), Ok(index)) = (tensors.at(number), u32::try_from(number)) else { continue };
            if entry.kind == Kind::Unloaded {
                continue;
            }
            let fuse = assignment.fuse_of(entry).and_then(|(fuse, part)| Some((fuses.get(fuse)?, part)));
            let Some((fuse, part)) = fuse else {
                groups.push(Group { place: place(tensor.name), is: GroupKind::One(index) });
                continue;
            };
            let param = assignment.param_of(entry);
            let components: Vec<_> = tensor.name.split('.').collect();
            let module = if param.is_empty() { components.len() } else { components.len().saturating_sub(1) };
            let stars =
                fuse.parts.get(part).and_then(|p| p.stars(components.get(..module)?)).unwrap_or_default();
            let stacked = stars.len() > fuse.into.split('.').filter(|c| *c == "*").count();
            let name = fill(&fuse.into, &stars, param);
            if tensors.find(&name).is_some_and(|there| there != number) {
                let problem = "the checkpoint has a tensor of that name".into();
                return Err(Refused::Fusion { name, problem });
            }
            let expert = if stacked { stars.last().and_then(|e| e.parse().ok()).unwrap_or(0) } else { 0 };
            let parts = u32::try_from(fuse.parts.len()).unwrap_or(u32::MAX);
            let part = u32::try_from(part).unwrap_or(u32::MAX);
            let made = || Fused { name: name.clone(), parts, stacked, members: Vec::new() };
            let group = fused.entry(name.clone()).or_insert_with(made);
            group.members.push(Member { expert, part, tensor: index });
        }
        for (name, mut group) in fused {
            group.members.sort_unstable();
            let twice = group.members.windows(2).any(|pair| match pair {
                [a, b] => (a.expert, a.part) == (b.expert, b.part),
                _ => false,
            });
            if twice {
                return Err(Refused::Fusion { name, problem: "one of its parts is there twice".into() });
            }
            groups.push(Group { place: place(&name), is: GroupKind::Fused(Box::new(group)) });
        }
        let name = |group: &Group| match &group.is {
            GroupKind::One(tensor) => tensors.at(*tensor as usize).map_or("", |t| t.name).to_owned(),
            GroupKind::Fused(fused) => fused.name.clone(),
        };
        // Names are looked up, not kept: a checkpoint's are long, and there are many.
        groups.sort_by(|a, b| {
            a.place.cmp(&b.place).then_with(|| match (&a.is, &b.is) {
                (GroupKind::One(x), GroupKind::One(y)) => {
                    let at = |i: u32| tensors.at(i as usize).map_or("", |t| t.name);
                    natural_order(at(*x), at(*y))
                }
                _ => natural_order(&name(a), &name(b)),
            })
        });
        Ok(Self(groups))
    }
}

/// `into` with its stars and `{param}` filled in.
fn fill(into: &str, stars: &[&str], param: &str) -> String {
    let mut stars = stars.iter();
    let filled: Vec<_> = into
        .split('.')
        .map(|c| {
            if c == "*" {
                stars.next().copied().unwrap_or("*").to_owned()
            } else {
                c.replace("{param}", param)
            }
        })
        .collect();
    filled.join(".")
}

impl Assignment<'_> {
    pub(crate) fn fuse_of(&self, entry: &super::Entry) -> Option<(usize, usize)> {
        self.fuses.get(entry.template as usize).copied().flatten()
    }

    pub(crate) fn param_of(&self, entry: &super::Entry) -> &str {
        self.params.get(entry.template as usize).map_or("", String::as_str)
    }

    /// The name of a group's tensor.
    pub(crate) fn name_of<'g>(&'g self, group: &'g Group) -> &'g str {
        match &group.is {
            GroupKind::One(tensor) => self.model.tensors.at(*tensor as usize).map_or("", |t| t.name),
            GroupKind::Fused(fused) => &fused.name,
        }
    }
}
