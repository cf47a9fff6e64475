//! The validation page: printed, written with `--write`, and with `--fit` the six free parameters found anew.

use flashboot_sim::{Profile, paper};
use std::{error::Error, fs, path::Path};

fn main() -> Result<(), Box<dyn Error>> {
    let profile = Profile::built_in("gb300")?;
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let page = || Ok::<_, flashboot_sim::Error>(paper::page(&profile, &paper::tables(&profile)?));
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => println!("{}", page()?),
        ["--write"] => {
            let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/results/paper.md");
            fs::write(path, page()?)?;
        }
        ["--fit"] => println!("{:#?}", paper::Fit::find(&profile)?),
        _ => return Err("nothing, --write or --fit".into()),
    }
    Ok(())
}
