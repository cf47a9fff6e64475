//! `flashboot reshard IMAGE -o IMAGE`: an image of another layout out of an image.

use super::layout::LayoutArgs;
use super::pack::{Timed, ranks_line};
use crate::{
    exit::{Code, Failure},
    output::Output,
    progress::Bar,
};
use clap::Args;
use flashboot_checkpoint::{Image, PackOptions};
use std::{path::PathBuf, time::Instant};

#[derive(Debug, Args)]
pub(crate) struct ReshardArgs {
    /// The image's directory; its stage must be sliced or engine-params
    image: PathBuf,
    /// The new image's directory; it appears whole or not at all
    #[arg(short, long, value_name = "IMAGE")]
    output: PathBuf,
    /// Replace an image that is there
    #[arg(long)]
    replace: bool,
    #[command(flatten)]
    layout: LayoutArgs,
}

pub(crate) fn run(args: &ReshardArgs, output: Output) -> Result<Code, Failure> {
    let began = Instant::now();
    let layout = args.layout.options()?;
    let image = Image::open(&args.image)?;
    let options = PackOptions { replace: args.replace, ..PackOptions::default() };
    let bar = Bar::new(output, "resharding");
    let packed = flashboot_checkpoint::reshard(&image, &args.output, &layout, &options, &bar)?;
    drop(bar);
    let took = began.elapsed();
    let timed = Timed { report: &packed, ms: took.as_secs_f64() * 1e3 };
    output.result(&timed, || ranks_line("resharded", &packed, took))?;
    Ok(Code::SUCCESS)
}
