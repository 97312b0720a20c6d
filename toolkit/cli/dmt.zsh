#compdef dmt
# Completion of dmt in zsh: eval "$(dmt completion zsh)", after compinit
_dmt() {
  local -a found
  found=(${(f)"$(dmt __complete zsh "${(j: :)words[1,CURRENT-1]} $PREFIX" 2>/dev/null)"})
  if (( ! $#found )); then
    _files
    return
  fi
  compadd -S '' -- ${(M)found:#*[=.]}  # the value or the rest of the key follows
  compadd -- ${found:#*[=.]}
}
compdef _dmt dmt
