//! Files and folders that only their owner may read: they hold texts of users.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::path::Path;

/// Makes an empty file that only its owner may read and write, unless there is one of the name. Others lose their rights to one that
/// is there, where the system lets this program take them.
///
/// # Errors
/// If the system refuses to make it.
pub fn make_private_file(path: &Path) -> io::Result<()> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(false);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let file = options.open(path)?;
    close_to_others(&file)
}

#[cfg(unix)]
fn close_to_others(file: &File) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    if file.metadata()?.permissions().mode() & 0o077 != 0 {
        // The owner may be another user, who has chosen so.
        let _ = file.set_permissions(std::fs::Permissions::from_mode(0o600));
    }
    Ok(())
}

/// Other systems have no modes.
#[cfg(not(unix))]
fn close_to_others(_: &File) -> io::Result<()> {
    Ok(())
}

/// Makes a folder, and those above it that are missing, which only their owner may enter. One that is there stays as it is.
///
/// # Errors
/// If the system refuses.
pub fn make_private_folder(folder: &Path) -> io::Result<()> {
    private_folders().recursive(true).create(folder)
}

/// Makes one folder that only its owner may enter.
pub(crate) fn make_one_private_folder(folder: &Path) -> io::Result<()> {
    private_folders().create(folder)
}

fn private_folders() -> DirBuilder {
    #[cfg_attr(not(unix), allow(unused_mut))]
    let mut builder = DirBuilder::new();
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder
}
