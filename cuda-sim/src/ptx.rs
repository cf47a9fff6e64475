//! As much of PTX as tells a program that the driver would take from one that it would not.

use crate::abi::code;

/// The newest PTX that the simulated driver knows (CUDA 13.0).
const NEWEST: (u32, u32) = (9, 0);
/// The simulated device's compute capability.
const CAPABILITY: u32 = 90;

/// Instructions, without their types.
const OPCODES: &[&str] = &[
    "abs",
    "add",
    "addc",
    "and",
    "atom",
    "bar",
    "barrier",
    "bfe",
    "bfi",
    "bra",
    "brev",
    "brx",
    "call",
    "clz",
    "cnot",
    "cp",
    "cvt",
    "cvta",
    "div",
    "ex2",
    "exit",
    "fence",
    "fma",
    "fns",
    "isspacep",
    "ld",
    "ldu",
    "lg2",
    "lop3",
    "mad",
    "mad24",
    "madc",
    "max",
    "membar",
    "min",
    "mov",
    "mul",
    "mul24",
    "nanosleep",
    "neg",
    "not",
    "or",
    "popc",
    "prefetch",
    "prmt",
    "rcp",
    "red",
    "rem",
    "ret",
    "rsqrt",
    "sad",
    "selp",
    "set",
    "setp",
    "shf",
    "shfl",
    "shl",
    "shr",
    "slct",
    "sqrt",
    "st",
    "sub",
    "subc",
    "testp",
    "trap",
    "vote",
    "xor",
];

/// The names of a program's entries, or why the driver refuses it (rows `module-garbage`, `module-ptx-broken`,
/// `module-ptx-version`, `module-ptx-target`).
pub(crate) fn entries(text: &str) -> Result<Vec<String>, u32> {
    let version = directive(text, ".version").ok_or(code::INVALID_IMAGE)?;
    let (major, minor) = version.split_once('.').ok_or(code::INVALID_PTX)?;
    let number = |text: &str| text.parse::<u32>().map_err(|_| code::INVALID_PTX);
    if (number(major)?, number(minor)?) > NEWEST {
        return Err(code::UNSUPPORTED_PTX_VERSION);
    }
    let target = directive(text, ".target").and_then(|target| target.strip_prefix("sm_"));
    if number(target.ok_or(code::INVALID_PTX)?)? > CAPABILITY {
        return Err(code::INVALID_PTX);
    }
    check_body(text)?;
    let names = text.split(".entry ").skip(1).filter_map(|rest| rest.split('(').next());
    Ok(names.map(|name| name.trim().to_owned()).collect())
}

/// The word after a directive that begins a line.
fn directive<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.trim().strip_prefix(name)?.split_whitespace().next())
}

/// Braces close, and every statement in them begins with an instruction, a directive, a label or a guard.
fn check_body(text: &str) -> Result<(), u32> {
    let mut depth = 0_u32;
    for line in text.lines().map(str::trim).filter(|line| !line.starts_with("//")) {
        match line {
            "{" => depth += 1,
            "}" => depth = depth.checked_sub(1).ok_or(code::INVALID_PTX)?,
            _ if depth == 0 || line.is_empty() => {}
            _ if line.starts_with(['.', '$']) || line.ends_with(':') => {}
            _ => {
                let instruction = match line.strip_prefix('@') {
                    Some(guarded) => guarded.split_once(char::is_whitespace).map_or("", |(_, rest)| rest),
                    None => line,
                };
                let opcode: String =
                    instruction.trim().chars().take_while(|c| c.is_ascii_alphanumeric()).collect();
                if !OPCODES.contains(&opcode.as_str()) || !line.ends_with(';') {
                    return Err(code::INVALID_PTX);
                }
            }
        }
    }
    if depth == 0 { Ok(()) } else { Err(code::INVALID_PTX) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KERNEL: &str = include_str!("../../cuda/kernels/blake3.ptx");

    #[test]
    fn the_products_kernel_is_taken_and_damaged_ones_are_not() {
        let kernels = ["flashboot_blake3_tiles", "flashboot_blake3_blocks", "flashboot_look"];
        assert_eq!(entries(KERNEL).unwrap(), kernels);
        let half: String = KERNEL.chars().take(KERNEL.len() / 2).collect();
        assert_eq!(entries(&half), Err(code::INVALID_PTX));
        assert_eq!(entries(&KERNEL.replacen("mov.u32", "nov.u32", 1)), Err(code::INVALID_PTX));
        assert_eq!(entries("this is no program"), Err(code::INVALID_IMAGE));
    }
}
