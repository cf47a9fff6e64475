//! What does not fit the memory at hand, found before anybody is started, as `replicate` does.

use super::plan::{Shape, Stage, holder};
use crate::{
    config::Memory,
    replicate::{Room, host_room},
};
use flashboot_core::{Error, Kind, Result};
use flashboot_cuda::{Device, bounded};
use std::time::Duration;

/// Parts `stages` into those that there is room for on `gpus` (UUIDs that ranks go around; none: host memory) and those that
/// there is none for, each with the reason. What others take meanwhile is not seen.
///
/// # Errors
/// The driver's, and [`Kind::Deadline`] when it does not say within `limit` what is free.
pub async fn admit(
    stages: Vec<Stage>,
    gpus: &[String],
    memory: Memory,
    limit: Duration,
) -> Result<(Vec<Stage>, Vec<(Stage, Error)>)> {
    let uuids = gpus.to_vec();
    let ask = move || uuids.iter().map(|uuid| Room::ask(&Device::find(uuid)?)).collect::<Result<Vec<_>>>();
    let rooms = bounded("device", "an answer of the driver", limit, ask).await?;
    let (mut fit, mut left) = (Vec::new(), Vec::new());
    for stage in stages {
        let admitted = if rooms.is_empty() {
            let ranks = u64::from(stage.shape.schedule().ranks());
            host_room(memory, stage.bytes.saturating_mul(ranks))
        } else {
            rooms.iter().enumerate().try_for_each(|(at, room)| {
                let (arenas, processes) = asked(stage.shape, at, rooms.len());
                room.admit(arenas, processes, stage.bytes)
            })
        };
        match admitted {
            Ok(()) => fit.push(stage),
            Err(e) if e.kind() == Kind::Exhausted => left.push((stage, e)),
            Err(e) => return Err(e),
        }
    }
    Ok((fit, left))
}

/// Arenas, and processes that use the GPU, at the `at`-th of so many.
fn asked(shape: Shape, at: usize, gpus: usize) -> (u32, u32) {
    let here = |rank: &u32| holder(*rank, gpus) == Some(at);
    let processes = (0..shape.schedule().ranks()).filter(here).count();
    // Who only imports has no arena of its own.
    let arenas = if shape == Shape::Import { usize::from(at == 0) } else { processes };
    let number = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    (number(arenas), number(processes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_counted_where_they_go() {
        let chain = Shape::Chain { clones: 4 };
        assert_eq!([0, 1].map(|at| asked(chain, at, 2)), [(3, 3), (2, 2)]);
        assert_eq!(asked(chain, 0, 1), (5, 5));
        assert_eq!(asked(Shape::Import, 0, 1), (1, 2), "an import has no arena");
        assert_eq!([0, 1].map(|at| asked(Shape::Import, at, 2)), [(1, 1), (0, 1)]);
    }
}
