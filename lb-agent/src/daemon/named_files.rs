//! The files that the configuration names and that an agent needs to start.

use std::{fs, path::Path};

use anyhow::Context as _;
use lb_web::{Access, Token};

use crate::{
    announce::Key,
    config::{Config, ConfigError, WebConfig, refused},
    flow_log::FlowLog,
};

/// Checks all these files.
///
/// # Errors
/// An agent with this configuration could not start.
pub(super) fn check(config: &Config) -> anyhow::Result<()> {
    config.web.as_ref().map(access_to_pages).transpose()?;
    config.announce.key_file.as_deref().map(read_key).transpose()?;
    config.flow_log.as_ref().map(FlowLog::check).transpose()?;
    Ok(())
}

/// Returns whether the web pages need a token, and which one.
///
/// # Errors
/// The file with the token is unreadable or has no valid token, or the address needs a token and there is no file.
pub(super) fn access_to_pages(WebConfig { address, token_file }: &WebConfig) -> anyhow::Result<Access> {
    let token = token_file.as_deref().map(|file| read_token("--web-token-file", file)).transpose()?;
    Access::new(*address, token)
        .with_context(|| format!("--web-bind-address {address} needs --web-token-file"))
}

/// Reads the token with which users of the web pages log in, from the file that `flag` names.
///
/// # Errors
/// The file is unreadable or has no valid token.
pub(crate) fn read_token(flag: &'static str, file: &Path) -> Result<Token, ConfigError> {
    let wrong = |reason: String| refused(flag, file.display(), reason);
    let text = fs::read_to_string(file).map_err(|error| wrong(format!("cannot read it: {error}")))?;
    Token::new(&text).map_err(|error| wrong(error.to_string()))
}

/// Reads the key of `--announce-key-file`.
pub(super) fn read_key(file: &Path) -> Result<Key, ConfigError> {
    Key::read(file).map_err(|error| refused("--announce-key-file", file.display(), format!("{error:#}")))
}
