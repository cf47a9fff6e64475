//! A class: what all tensors of one name pattern, shape and type have in common.

use super::cut::{Cut, Indivisible, Share, along, features};
use crate::quant::{Axes, Features, Parameter, Quantisation, Unknown};
use crate::recipe::{Rule, Split};
use flashboot_core::Dtype;

/// What a tensor's class is told apart by.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    pub(crate) template: u32,
    pub(crate) shape: Vec<u64>,
    pub(crate) dtype: Dtype,
    /// Of the module, where the tensor is not its weight.
    pub(crate) features: Option<Features>,
    /// Where layers have expert maps of their own.
    pub(crate) layer: u32,
    /// The draft's experts may be counted and spread otherwise.
    pub(crate) draft: bool,
}

/// One class.
#[derive(Debug, Clone)]
pub(crate) struct Class {
    pub(crate) key: Key,
    /// By part; one for all where nothing is cut.
    pub(crate) cuts: Vec<Option<Cut>>,
    pub(crate) is_expert: bool,
    /// Whether its first dimension counts experts that groups own.
    pub(crate) lead: bool,
    /// The dimension of outputs: what fused parts are joined along.
    pub(crate) outputs: Option<usize>,
}

/// Why a class cannot be cut.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Problem {
    Parameter,
    Shape(String),
    Indivisible(u32, Indivisible),
    /// An element narrower than a byte would be cut inside one.
    HalfByte(u32),
    NoFact(String),
}

/// What cutting needs beside the class itself.
#[derive(Clone, Copy)]
pub(crate) struct Context<'c> {
    pub(crate) rule: &'c Rule,
    pub(crate) quant: &'c Quantisation,
    /// How many parts.
    pub(crate) width: u32,
    pub(crate) chunked: bool,
    pub(crate) vocab_multiple: Option<u64>,
    pub(crate) fact: &'c dyn Fn(&str) -> Option<u64>,
}

/// The cuts of every part, and the dimension of outputs.
pub(crate) fn cuts(
    p: &Parameter<'_>,
    module: Option<Features>,
    context: &Context<'_>,
) -> Result<(Vec<Option<Cut>>, Option<usize>), Problem> {
    let Context { rule, quant, width, .. } = *context;
    let features = module.or_else(|| quant.features(p));
    if rule.split == Split::Replicated {
        let axes = features.and_then(|f| quant.axes(p, f).ok()).unwrap_or_default();
        return Ok((vec![None], axes.outputs.map(|axis| axis.dim)));
    }
    let features = features.ok_or_else(|| Problem::Shape("a weight beside it".into()))?;
    let axes: Axes = quant.axes(p, features).map_err(|unknown| match unknown {
        Unknown::Name => Problem::Parameter,
        Unknown::Shape(needed) => Problem::Shape(needed),
    })?;
    let outputs = axes.outputs.map(|axis| axis.dim);
    let axis = if rule.split == Split::Row { axes.inputs } else { axes.outputs };
    let Some(axis) = axis else { return Ok((vec![None], outputs)) };
    let size = if rule.split == Split::Row { features.inputs } else { features.outputs };
    let share = share(context)?;
    let mut cuts = Vec::with_capacity(width as usize);
    for k in 0..width {
        let indivisible = |e| Problem::Indivisible(width, e);
        let (ranges, extent) = self::features(share, size, k.into(), width.into()).map_err(indivisible)?;
        let cut = along(axis, &ranges, extent, size).map_err(indivisible)?;
        if super::cut::part(p.shape, p.dtype, None, Some(&cut)).is_none() {
            return Err(Problem::HalfByte(width));
        }
        cuts.push(Some(cut));
    }
    if cuts
        .iter()
        .flatten()
        .all(|cut| cut.ranges == [(0, cut.extent)] && p.shape.get(cut.dim) == Some(&cut.extent))
    {
        cuts = vec![None];
    }
    Ok((cuts, outputs))
}

fn share(context: &Context<'_>) -> Result<Share, Problem> {
    let Context { rule, chunked, vocab_multiple, fact, .. } = *context;
    let number = |key: &Option<String>| match key {
        None => Ok(0),
        Some(key) => fact(key).filter(|n| *n > 0).ok_or_else(|| Problem::NoFact(key.clone())),
    };
    Ok(match rule.split {
        Split::Qkv => {
            let (heads, kv_heads) = (number(&rule.heads)?, number(&rule.kv_heads)?);
            Share::Qkv { heads, kv_heads, order: rule.order }
        }
        _ if rule.parts > 1 => Share::Parts(rule.parts),
        _ if chunked => Share::Chunks,
        Split::Vocab => vocab_multiple.map_or(Share::Chunks, Share::Padded),
        _ if rule.heads.is_some() => Share::Heads(number(&rule.heads)?),
        _ => Share::Even,
    })
}
